"""How a device is divided among models without sizes."""

from hypothesis import given
from hypothesis import strategies as st

from melld.landlord.division import LEAST_PART, divide
from melld.landlord.granules import GRANULE_UNIT_BYTES

GIB = 1 << 30
SIZES = st.lists(st.integers(1 << 20, 40 * GIB), min_size=1, max_size=6)


@given(st.integers(GIB, 80 * GIB), SIZES, st.booleans())
def test_models_loaded_together_fit(memory: int, held: list[int], lends: bool) -> None:
    """Any so many of them, the largest too; each has its minimum, and one more would not fit."""
    found = divide(memory, held, lends=lends)
    largest = sorted(held, reverse=True)
    assert sum(largest[: found.together]) + found.lent_bytes + found.together * found.own_bytes <= memory
    assert not (found.lent_bytes and found.own_bytes)
    if found.together:
        share = found.own_bytes or found.lent_bytes // found.together
        assert share >= LEAST_PART * memory - GRANULE_UNIT_BYTES
    if found.together < len(held):
        more = found.together + 1
        assert memory - sum(largest[:more]) < more * int(LEAST_PART * memory)


@given(st.integers(GIB, 80 * GIB), SIZES)
def test_memory_is_lent_only_if_all_models_fit_beside_it(memory: int, held: list[int]) -> None:
    """Then it is all that they leave, less a fraction of a granule."""
    found = divide(memory, held, lends=True)
    assert bool(found.lent_bytes) == (found.together == len(held))
    if found.lent_bytes:
        assert memory - sum(held) - found.lent_bytes < GRANULE_UNIT_BYTES


def test_the_chosen_division_is_reported() -> None:
    """An operator sees it without arithmetic."""
    told = [divide(40 * GIB, [16 * GIB, 8 * GIB], lends=lends).in_words(2) for lends in (True, False)]
    assert told == [
        "16,384 MiB of KV memory, which 2 models lend each other",
        "each of 2 models has 8,192 MiB of KV memory, all fit at a time",
    ]
    assert divide(20 * GIB, [16 * GIB, 8 * GIB], lends=True).in_words(2).endswith("any 1 of them fit at a time")
