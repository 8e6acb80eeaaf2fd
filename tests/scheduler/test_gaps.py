"""How soon workers were needed again: the history alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.scheduler.idle import GAPS, Gaps


def test_a_worker_is_unneeded_from_the_moment_fewer_suffice() -> None:
    """The time counts from the fall, whatever happens below."""
    gaps = Gaps()
    gaps.needed(2, 0.0)
    gaps.needed(1, 10.0)
    assert gaps.since_s(1, 11.0) == 0.0
    gaps.needed(0, 12.0)
    gaps.needed(1, 13.0)
    assert gaps.since_s(2, 15.0) == pytest.approx(5.0)
    assert gaps.since_s(1, 15.0) == 0.0, "that one is needed"


@given(counts=st.lists(st.integers(0, 5), max_size=40))
def test_a_gap_exists_only_once_a_worker_is_needed_again(counts: list[int]) -> None:
    """A level reached once has none, and each gap lies within the time that has passed."""
    gaps = Gaps()
    for now_s, count in enumerate(counts):
        gaps.needed(count, float(now_s))
    for level in range(1, 6):
        rises = sum(after >= level > before for before, after in zip([0, *counts], counts, strict=False))
        assert len(gaps.of(level)) == max(rises - 1, 0)
        assert all(1.0 <= gap_s <= len(counts) for gap_s in gaps.of(level))


def test_old_gaps_are_forgotten() -> None:
    """Last week's habits do not keep a worker awake tonight."""
    gaps = Gaps()
    for number in range(GAPS + 2):
        gaps.needed(1, 10.0 * number)
        gaps.needed(0, 10.0 * number + 1.0 + number / 100)
    assert len(gaps.of(1)) == GAPS
    assert gaps.of(1)[-1] < gaps.of(1)[0]
