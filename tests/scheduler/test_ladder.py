"""A ladder keeps its things by key, and among equal keys by order, whatever is put in, moved and taken out."""

from hypothesis import given
from hypothesis import strategies as st

from melld.scheduler.ladder import Ladder


class Thing:
    """Something with an order."""

    def __init__(self, order: int) -> None:
        self.order = order


THINGS = [Thing(order) for order in (1, 2, 3, 4, 5, 1 << 33)]
numbers = st.integers(0, len(THINGS) - 1)
keys = st.integers(-3, 3) | st.integers(0, 1 << 50)


@given(st.lists(st.tuples(numbers, st.none() | keys), max_size=40), keys, keys)
def test_things_stand_by_key_and_order(changes: list[tuple[int, int | None]], key: int, floor: int) -> None:
    """Of two equal fits every query returns the same one, so that a log can be replayed."""
    ladder: Ladder[Thing] = Ladder()
    held: dict[Thing, int] = {}
    for number, new_key in changes:
        thing = THINGS[number]
        ladder.put(thing, new_key)
        held.pop(thing, None)
        if new_key is not None:
            held[thing] = new_key
    ranked = sorted(held, key=lambda thing: (held[thing], thing.order))
    assert [thing in ladder for thing in THINGS] == [thing in held for thing in THINGS]
    assert len(ladder) == len(held)
    assert (list(ladder.upwards()), list(ladder.downwards())) == (ranked, ranked[::-1])
    assert list(ladder.upwards(floor)) == [thing for thing in ranked if floor <= held[thing]]
    within = [thing for thing in ranked[::-1] if floor <= held[thing] <= key]
    assert list(ladder.downwards(key, floor)) == within
    ladder.refill(held.items())
    assert list(ladder.upwards()) == ranked
    assert list(ladder.downwards(key, floor)) == within
