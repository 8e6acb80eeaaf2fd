"""The time scale that mell-plus derives from how long requests run."""

import pytest

from melld.scheduler.policies.plus.settings import BALANCED, FASTEST, REFERENCE_S, SLOWEST, Lifetimes


def test_before_anything_has_ended_the_settings_apply_literally() -> None:
    """A fresh daemon behaves as documented."""
    assert Lifetimes().pace == 1.0
    assert BALANCED.at_pace(1.0) == BALANCED


@pytest.mark.parametrize(
    ("seconds", "pace"), [(REFERENCE_S / 2, 0.5), (REFERENCE_S / 1000, FASTEST), (REFERENCE_S * 1000, SLOWEST)]
)
def test_the_time_scale_follows_the_mean_life_within_limits(seconds: float, pace: float) -> None:
    """A model that answers in seconds is packed on a finer scale than one that writes for minutes."""
    lifetimes = Lifetimes()
    for _ in range(3000):
        lifetimes.ended(seconds)
    assert lifetimes.pace == pytest.approx(pace, rel=0.01)
    assert BALANCED.at_pace(pace).dispatch_life_s == pytest.approx(BALANCED.dispatch_life_s * pace)


def test_a_few_short_requests_barely_change_the_time_scale() -> None:
    """After a start the short ones end first; they are not typical."""
    lifetimes = Lifetimes()
    for _ in range(10):
        lifetimes.ended(1.0)
    assert lifetimes.pace > 0.9
