"""Promises of what ended requests do to the plan: too many that were late or slow make it more careful."""

import pytest

from melld.scheduler.policies.slo.constants import (
    CAUTION_DOWN,
    CAUTION_UP,
    FIRST_CAUTION,
    FIRST_PRICE_S,
    LEAST_CAUTION,
    LEAST_PRICE_S,
    MOST_OVER,
    MOST_PRICE_S,
    PRICE_DOWN,
    PRICE_UP,
    WORTH,
)
from melld.scheduler.policies.slo.feedback import Feedback
from melld.scheduler.policies.slo.missing import MissingWorkers
from melld.scheduler.targets import Targets
from tests.scheduler.driving import scheduler_with
from tests.scheduler.policies.slo.test_missing import waking_beside

TARGETS = Targets(itl_s=0.05, ttft_s=2.0, prefill_times=4.0, attainment=0.9)
ITL_S = 0.05
PLACEMENTS, ENDED = 10, 20
"""As many as one may be late of, or two slow, are judged together."""


def fresh() -> Feedback:
    """Nothing has ended."""
    return Feedback(TARGETS, MissingWorkers(scheduler_with(1).cluster))


def started(late: int, feedback: Feedback | None = None, prefill_s: float = 0.0) -> Feedback:
    """As many first tokens as are judged together, so many of them late."""
    feedback = feedback or fresh()
    allowed_s = TARGETS.first_token_s(prefill_s)
    for number in range(PLACEMENTS):
        is_late = number < late
        assert feedback.started(allowed_s + 0.1 if is_late else allowed_s, prefill_s) is not is_late
    return feedback


def ended(slow: int, feedback: Feedback | None = None, tokens: int = 101) -> Feedback:
    """As many answers as are judged together, so many of them slow."""
    feedback = feedback or fresh()
    allowed_s = max(tokens - 1, 32) * ITL_S
    for number in range(ENDED):
        is_slow = number < slow
        assert feedback.ended(1.01 * allowed_s if is_slow else 0.99 * allowed_s, tokens, ITL_S) is not is_slow
    return feedback


@pytest.mark.parametrize(
    ("late", "times"),
    [(0, PRICE_DOWN), (1, PRICE_DOWN), (2, PRICE_UP), (4, PRICE_UP**3), (10, PRICE_UP**MOST_OVER)],
)
@pytest.mark.parametrize("prefill_s", [0.0, 3.0])
def test_a_late_start_becomes_dearer_while_more_are_late_than_may_be(late: int, times: float, prefill_s: float) -> None:
    """One in ten may be, and the more were late, the dearer; a long prompt is given more time."""
    feedback = started(late, prefill_s=prefill_s)
    assert feedback.price_s == pytest.approx(FIRST_PRICE_S * times)
    assert feedback.caution == FIRST_CAUTION


@pytest.mark.parametrize(("slow", "times"), [(0, CAUTION_DOWN), (2, CAUTION_DOWN), (3, CAUTION_UP)])
@pytest.mark.parametrize("tokens", [5, 33, 101])
def test_caution_grows_while_more_are_slow_than_may_be(slow: int, times: float, tokens: int) -> None:
    """One in ten may be; the pace of a short answer is judged as if it were longer.  More workers would have helped."""
    feedback = ended(slow, tokens=tokens)
    assert feedback.caution == pytest.approx(FIRST_CAUTION * times)
    assert feedback.price_s == pytest.approx(FIRST_PRICE_S * (PRICE_UP**0.5 if slow > 2 else 1.0))


def test_each_judgement_is_of_the_requests_since_the_last() -> None:
    """Long ago is no reason."""
    feedback = ended(2, started(1, ended(4, started(2))))
    assert feedback.price_s == pytest.approx(FIRST_PRICE_S * PRICE_UP * PRICE_UP * PRICE_DOWN)
    assert feedback.caution == pytest.approx(FIRST_CAUTION * CAUTION_UP * CAUTION_DOWN)


def test_price_and_caution_stay_within_limits() -> None:
    """A bad hour must not keep workers awake for days."""
    feedback = fresh()
    for _ in range(30):
        ended(ENDED, started(PLACEMENTS, feedback))
    assert (feedback.price_s, feedback.caution) == (MOST_PRICE_S, 1.0)
    for _ in range(60):
        ended(0, started(0, feedback))
    assert (feedback.price_s, feedback.caution) == (LEAST_PRICE_S, LEAST_CAUTION)


def test_where_no_pace_is_promised_no_answer_is_slow() -> None:
    """Nothing to learn from."""
    feedback = fresh()
    for _ in range(ENDED):
        assert feedback.ended(1000.0, 10, None)
    assert feedback.caution == FIRST_CAUTION


def test_where_one_wake_makes_many_miss_a_missing_worker_may_cost_more_than_a_minute() -> None:
    """As much as a promise is worth."""
    missing = MissingWorkers(scheduler_with(1).cluster)
    feedback = Feedback(TARGETS, missing)
    waking_beside(missing, missed=50, good=100, seconds=200.0)
    assert WORTH * missing.cost_s > MOST_PRICE_S
    for _ in range(30):
        started(PLACEMENTS, feedback)
    assert feedback.price_s == pytest.approx(WORTH * missing.cost_s)
