"""How long an unneeded worker stays awake."""

import pytest

from melld.scheduler.idle import MARGIN, kept_s

PRICE_S = 20.0


def test_without_history_waiting_costs_as_much_as_waking() -> None:
    """The classic rule, never more than twice as dear as knowing the future."""
    assert kept_s((), PRICE_S) == PRICE_S


@pytest.mark.parametrize(
    ("gaps_s", "longest_s"), [((5.0, 6.0, 9.0), 9.0), ((100.0, 200.0, 300.0), 0.0), ((*[5.0] * 9, 300.0), 5.0)]
)
def test_short_gaps_are_bridged_and_long_ones_are_not(gaps_s: tuple[float, ...], longest_s: float) -> None:
    """What is soon needed again is cheaper awake; a long gap is given up at once, or once it shows itself.

    The next gap may be a little longer than any before.
    """
    assert kept_s(gaps_s, PRICE_S) == MARGIN * longest_s


@pytest.mark.parametrize(
    ("longest_s", "price_s", "kept"), [(30.0, 180.0, 60.0), (5.0, 130.0, 23.12), (10.0, 20.0, 12.5), (200.0, 20.0, 0.0)]
)
def test_a_record_gap_is_borne_longer_the_dearer_waking_is(longest_s: float, price_s: float, kept: float) -> None:
    """Three pauses of a quarter of a minute do not rule out a minute's pause, and waking may take minutes."""
    assert kept_s((longest_s / 2, longest_s / 3, longest_s), price_s) == pytest.approx(kept, abs=0.01)
