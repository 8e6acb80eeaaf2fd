"""A worker's prefill ahead of a move keeps to the given rate."""

from hypothesis import given
from hypothesis import strategies as st

from melld.migrate.pacing import WINDOW_S, SlicePace

BLOCK = 16
SLICES = st.lists(st.tuples(st.integers(1, 512), st.floats(0.0, 0.5)), min_size=1, max_size=60)


@given(st.floats(1.0, 50_000.0), SLICES)
def test_no_interval_exceeds_the_rate_by_more_than_a_slice(rate: float, slices: list[tuple[int, float]]) -> None:
    """However long slices are wanted and whenever they could begin, others lose no more than the boundary says."""
    pace, now_s, begun = SlicePace(rate, BLOCK), 0.0, []
    for blocks, late_s in slices:
        now_s = max(now_s, pace.due_s) + late_s
        tokens = pace.slice_tokens(blocks * BLOCK)
        pace.began(tokens, now_s)
        begun.append((now_s, tokens))
    for first, (since_s, _) in enumerate(begun):
        for last in range(first, len(begun)):
            in_it = sum(tokens for _, tokens in begun[first:last])
            assert in_it <= rate * (begun[last][0] - since_s) * (1 + 1e-9) + 1e-6


@given(st.floats(1.0, 50_000.0), st.integers(1, 512))
def test_a_slice_is_whole_blocks_of_one_window(rate: float, blocks: int) -> None:
    """Only whole blocks are kept; and one long slice would be the very burst that pacing prevents."""
    tokens = SlicePace(rate, BLOCK).slice_tokens(blocks * BLOCK)
    assert tokens % BLOCK == 0
    assert BLOCK <= tokens <= max(rate * WINDOW_S, BLOCK)


def test_without_a_rate_slices_follow_one_another() -> None:
    """A move within its boundary runs at full speed."""
    pace = SlicePace(0.0, BLOCK)
    pace.began(512, 7.0)
    assert (pace.slice_tokens(8192), pace.due_s) == (8192, 7.0)


def test_the_next_slice_is_due_when_this_one_s_time_is_over() -> None:
    """The first at once."""
    pace = SlicePace(100.0, BLOCK)
    assert pace.due_s == 0.0
    pace.began(50, 2.0)
    assert pace.due_s == 2.5
