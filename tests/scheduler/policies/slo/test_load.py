"""Promises of what is known of a worker's accepted prompts."""

import math

import pytest

from melld.ids import RequestId, WorkerId
from melld.scheduler.policies.slo.constants import ACCEPTED_S
from melld.scheduler.policies.slo.load import Loads, WorkerLoad
from melld.scheduler.state import Worker

A, B, C = map(RequestId, "abc")


def accept(
    load: WorkerLoad,
    request: RequestId,
    prefill_s: float,
    now_s: float,
    due_s: float = math.inf,
    *,
    urgent: bool = False,
) -> None:
    """The worker accepts a prompt; where the first token would be late, it is due 100 s later."""
    load.accept(request, prefill_s, now_s, (not urgent, due_s), 100.0)


def test_prompts_are_computed_one_after_the_other() -> None:
    """The backlog is what is left of them, and an idle time is not made up for."""
    load = WorkerLoad(0.0)
    accept(load, A, 2.0, 1.0)
    accept(load, B, 3.0, 2.0)
    assert load.backlog_s(2.0) == 4.0
    assert load.backlog_s(7.0) == 0.0
    accept(load, C, 1.0, 10.0)
    assert load.backlog_s(10.5) == 0.5


def test_a_worker_that_wakes_computes_its_first_prompt_after_that() -> None:
    """Its readers wait for both."""
    load = WorkerLoad(5.0)
    assert load.backlog_s(1.0) == 4.0
    accept(load, A, 1.0, 1.0)
    assert load.backlog_s(1.0) == 5.0


def test_how_busy_prompts_keep_a_worker_fades() -> None:
    """The mean of the last seconds; the time of waking does not count."""
    load = WorkerLoad(0.0)
    accept(load, A, 2.0, 0.0)
    assert load.prefilling(0.0) == 2.0 / ACCEPTED_S
    assert load.prefilling(ACCEPTED_S) == pytest.approx(2.0 / ACCEPTED_S / math.e)
    accept(load, B, 1.0, ACCEPTED_S)
    assert load.prefilling(ACCEPTED_S) == pytest.approx((2.0 / math.e + 1.0) / ACCEPTED_S)
    waking = WorkerLoad(20.0)
    accept(waking, A, 2.0, 1.0)
    assert waking.prefilling(1.0) == waking.prefilling(20.0) == 2.0 / ACCEPTED_S


def test_a_request_is_delayed_by_the_prompts_that_come_after_it() -> None:
    """And has decoded for the time since its first token, less what those have taken of it so far."""
    load = WorkerLoad(0.0)
    accept(load, A, 1.0, 0.0)
    accept(load, B, 2.0, 5.0)
    assert list(load.delays(5.0)) == [(2.0, 4.0), (0.0, 0.0)]
    assert list(load.delays(6.0)) == [(2.0, 4.0), (0.0, 0.0)]
    assert list(load.delays(10.0)) == [(2.0, 7.0), (0.0, 3.0)]


def test_the_prompt_goes_first_whose_token_is_due_first() -> None:
    """It is computed at once, the others that much later; what was due before it stays before it."""
    load = WorkerLoad(0.0)
    accept(load, A, 8.0, 0.0, 90.0)
    accept(load, B, 2.0, 1.0, 9.0)
    assert [load.first_s(one) for one in (A, B)] == [10.0, 3.0]
    assert load.backlog_s(1.0) == 9.0
    accept(load, C, 1.0, 2.0, 12.0)
    assert [load.first_s(one) for one in (A, B, C)] == [11.0, 3.0, 4.0]
    assert [load.ahead_s((True, due_s), 2.0) for due_s in (5.0, 9.0, 20.0, 90.0)] == [0.0, 1.0, 2.0, 9.0]
    accept(load, RequestId("urgent"), 5.0, 2.5, 99.0, urgent=True)
    assert load.first_s(RequestId("urgent")) == 7.5
    assert load.first_s(A) == 16.0


def test_who_overtakes_is_delayed_by_the_prompts_behind_it() -> None:
    """They are computed while it decodes already; who is overtaken waits for its first token, and is not delayed."""
    load = WorkerLoad(0.0)
    accept(load, A, 8.0, 0.0, 90.0)
    accept(load, B, 2.0, 1.0, 9.0)
    assert list(load.delays(3.0)) == [(0.0, 0.0), (7.0, 0.0)]
    assert list(load.delays(10.0)) == [(0.0, 0.0), (7.0, 0.0)]
    assert list(load.delays(12.0)) == [(0.0, 2.0), (7.0, 2.0)]


def test_a_prompt_makes_those_late_that_had_just_been_in_time() -> None:
    """Neither those that are late anyway, nor those that go before it, nor those that have been computed."""
    load = WorkerLoad(0.0)
    accept(load, A, 8.0, 0.0, 9.0)
    accept(load, B, 2.0, 0.0, 50.0)
    assert [load.made_late((True, 8.0), seconds, 0.0) for seconds in (1.0, 1.1, 40.0, 40.1)] == [0, 1, 1, 2]
    assert [load.made_late((True, due_s), 60.0, 0.0) for due_s in (9.0, 50.0)] == [1, 0]
    assert load.made_late((True, 8.0), 60.0, 8.0) == 1
    late = WorkerLoad(10.0)
    late.accept(A, 1.0, 0.0, (True, 5.0), 0.0)
    assert late.made_late((True, 4.0), 60.0, 0.0) == 0


def test_who_is_late_anyway_waits_for_who_is_not() -> None:
    """Its token is due anew, so much later; until then others are served in time."""
    load = WorkerLoad(8.0)
    accept(load, A, 1.0, 0.0, 2.0)
    accept(load, B, 1.0, 8.0, 10.0)
    accept(load, C, 1.0, 8.5, 200.0)
    assert [load.first_s(one) for one in (A, B, C)] == [10.0, 9.0, 11.0]


def test_a_move_takes_the_delay_along() -> None:
    """The reader has waited, wherever that was; what the new worker accepted before did not delay this request."""
    source, destination = WorkerLoad(0.0), WorkerLoad(0.0)
    accept(source, A, 1.0, 0.0)
    accept(source, B, 2.0, 5.0)
    moved = source.release(A)
    assert moved == (2.0, 1.0)
    assert source.release(A) is None
    accept(destination, C, 4.0, 0.0)
    destination.adopt(A, *moved)
    assert list(destination.delays(21.0)) == [(0.0, 17.0), (2.0, 18.0)]
    accept(destination, B, 1.0, 21.0)
    assert list(destination.delays(22.0)) == [(1.0, 17.0), (3.0, 18.0), (0.0, 0.0)]


def test_a_worker_that_was_woken_again_begins_anew() -> None:
    """What it had accepted before it slept is long done, and first it wakes."""
    loads, worker = Loads(), Worker(WorkerId("w0"), 1000, 8, 0, 1)
    load = loads.of(worker, 0.0)
    accept(load, A, 50.0, 0.0)
    assert loads.of(worker, 1.0) is load
    worker.order, worker.wake_s = worker.order + 1, 3.0
    assert loads.of(worker, 10.0).backlog_s(10.0) == 3.0
