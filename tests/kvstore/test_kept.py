"""How requests of a model move, as operators read it."""

import pytest

from melld.kvstore.kept import KINDS, Kept, are_known, moves_text, uncopied

FULL, STATE, WINDOWS = "FullAttentionSpec", "MambaSpec", "SlidingWindowSpec"


@pytest.mark.parametrize(
    ("kept", "generates", "told"),
    [
        (Kept((FULL,), 8192.0), True, "KV, 8.19 KB a token"),
        (Kept((FULL, STATE), 20480.0, 65_000_000), True, "KV with state, 65 MB + 20.5 KB a token"),
        (Kept((STATE,), 0.0, 2_500_000_000), True, "KV with state, 2.5 GB"),
        (Kept((WINDOWS, STATE, FULL)), True, "KV with windows and state"),
        (Kept((FULL, "CrossAttentionSpec"), 1.0), True, "tokens, not KV (an encoder's output)"),
        (Kept((FULL,), 1.0), False, "none: each finishes in one step"),
        (Kept(), False, "none: each finishes in one step, without KV"),
    ],
)
def test_a_line_says_what_moves_and_how_large_it_is(kept: Kept, generates: bool, told: str) -> None:
    """Before the first request an operator knows what a drain or hand-over will carry."""
    assert moves_text(kept, generates) == told


def test_a_worker_that_cannot_share_its_memory_says_so() -> None:
    """The model could move by KV, but not from here."""
    assert moves_text(Kept((FULL,), 1.0), True, "lent GPU memory cannot be read by siblings") == (
        "tokens, not KV (lent GPU memory cannot be read by siblings)"
    )
    assert moves_text(Kept((FULL,), 1.0), True, refusal="the worker has a KV connector").startswith("none: the worker")


def test_an_unknown_kind_of_block_does_not_move() -> None:
    """A kind that a new vLLM brings must be decided on before it is touched."""
    assert are_known(KINDS)
    assert not are_known([FULL, "CircularBufferSpec"])
    assert uncopied([FULL, "CircularBufferSpec"])
    assert moves_text(Kept((FULL, "CircularBufferSpec"), 1.0), True).startswith("none: ")
