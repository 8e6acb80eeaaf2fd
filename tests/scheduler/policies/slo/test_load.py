"""Promises of what is known of a worker's accepted prompts."""

import math

import pytest

from melld.ids import RequestId, WorkerId
from melld.scheduler.policies.slo.load import MEMORY_S, Loads, WorkerLoad
from melld.scheduler.state import Worker

A, B, C = map(RequestId, "abc")


def test_prompts_are_computed_one_after_the_other() -> None:
    """The backlog is what is left of them, and an idle time is not made up for."""
    load = WorkerLoad(0.0)
    load.accept(A, 2.0, 1.0)
    load.accept(B, 3.0, 2.0)
    assert load.backlog_s(2.0) == 4.0
    assert load.backlog_s(7.0) == 0.0
    load.accept(C, 1.0, 10.0)
    assert load.backlog_s(10.5) == 0.5


def test_a_worker_that_wakes_computes_its_first_prompt_after_that() -> None:
    """Its readers wait for both."""
    load = WorkerLoad(5.0)
    assert load.backlog_s(1.0) == 4.0
    load.accept(A, 1.0, 1.0)
    assert load.backlog_s(1.0) == 5.0


def test_how_busy_prompts_keep_a_worker_fades() -> None:
    """The mean of the last seconds; the time of waking does not count."""
    load = WorkerLoad(0.0)
    load.accept(A, 2.0, 0.0)
    assert load.prefilling(0.0) == 2.0 / MEMORY_S
    assert load.prefilling(MEMORY_S) == pytest.approx(2.0 / MEMORY_S / math.e)
    load.accept(B, 1.0, MEMORY_S)
    assert load.prefilling(MEMORY_S) == pytest.approx((2.0 / math.e + 1.0) / MEMORY_S)
    waking = WorkerLoad(20.0)
    waking.accept(A, 2.0, 1.0)
    assert waking.prefilling(1.0) == waking.prefilling(20.0) == 2.0 / MEMORY_S


def test_a_request_is_delayed_by_the_prompts_that_come_after_it() -> None:
    """And has decoded for the time since its first token, less what those have taken of it so far."""
    load = WorkerLoad(0.0)
    load.accept(A, 1.0, 0.0)
    load.accept(B, 2.0, 5.0)
    assert list(load.delays(5.0)) == [(2.0, 4.0), (0.0, 0.0)]
    assert list(load.delays(6.0)) == [(2.0, 4.0), (0.0, 0.0)]
    assert list(load.delays(10.0)) == [(2.0, 7.0), (0.0, 3.0)]


def test_a_move_takes_the_delay_along() -> None:
    """The reader has waited, wherever that was; what the new worker accepted before did not delay this request."""
    source, destination = WorkerLoad(0.0), WorkerLoad(0.0)
    source.accept(A, 1.0, 0.0)
    source.accept(B, 2.0, 5.0)
    moved = source.release(A)
    assert moved == (2.0, 1.0)
    assert source.release(A) is None
    destination.accept(C, 4.0, 0.0)
    destination.adopt(A, *moved)
    assert list(destination.delays(21.0)) == [(0.0, 17.0), (2.0, 18.0)]
    destination.accept(B, 1.0, 21.0)
    assert list(destination.delays(22.0)) == [(1.0, 17.0), (3.0, 18.0), (0.0, 0.0)]


def test_a_worker_that_was_woken_again_begins_anew() -> None:
    """What it had accepted before it slept is long done, and first it wakes."""
    loads, worker = Loads(), Worker(WorkerId("w0"), 1000, 8, 0, 1)
    load = loads.of(worker, 0.0)
    load.accept(A, 50.0, 0.0)
    assert loads.of(worker, 1.0) is load
    worker.order, worker.wake_s = worker.order + 1, 3.0
    assert loads.of(worker, 10.0).backlog_s(10.0) == 3.0
