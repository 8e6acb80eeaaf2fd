"""Promises of how long a worker that is not needed stays awake."""

import pytest

from melld.scheduler.policies.slo.rental import Rental

PRICE_S = 20.0


def rental_after(*gaps_s: float) -> tuple[Rental, float]:
    """A rental whose second worker was needed for a second after each of these gaps, and the time now."""
    rental, now_s = Rental(), 0.0
    rental.needed(2, now_s)
    for gap_s in gaps_s:
        rental.needed(1, now_s + 1.0)
        now_s += 1.0 + gap_s
        rental.needed(2, now_s)
    rental.needed(1, now_s)
    return rental, now_s


def test_without_history_waiting_costs_as_much_as_waking() -> None:
    """The classic rule, never more than twice as dear as knowing the future."""
    assert Rental().keep_s(1, PRICE_S) == PRICE_S


@pytest.mark.parametrize(("gaps_s", "kept_s"), [((5.0, 6.0, 7.0), 7.0), ((100.0, 200.0, 300.0), 0.0)])
def test_short_gaps_are_bridged_and_long_ones_are_not(gaps_s: tuple[float, ...], kept_s: float) -> None:
    """A worker that is needed again soon is cheaper awake; one that is needed in minutes is not."""
    rental, _ = rental_after(*gaps_s)
    assert rental.keep_s(2, PRICE_S) == kept_s


def test_mixed_gaps_are_bridged_up_to_the_length_that_pays() -> None:
    """Among many short gaps a long one is given up once it shows itself."""
    rental, now_s = rental_after(*[5.0] * 9, 300.0)
    assert rental.keep_s(2, PRICE_S) == 5.0
    assert rental.since_s(2, now_s + 3.0) == pytest.approx(3.0)
    assert rental.since_s(1, now_s + 3.0) == 0.0, "that one is needed"
