"""Which sleeping worker is woken first."""

import pytest

from melld.scheduler import events as e
from tests.scheduler.driving import arrive, finish, placed, scheduler_with


def test_a_warm_worker_is_woken_before_one_whose_process_has_ended() -> None:
    """No request waits for a start while a warm worker has room."""
    scheduler = scheduler_with(workers=3)
    scheduler.handle(e.WorkerWakeTimeChanged(1.0, "w0", 5.0))
    assert placed(arrive(scheduler, "r1", 900, 2.0)) == {"r1": "w1"}
    assert placed(arrive(scheduler, "r2", 900, 2.0)) == {"r2": "w2"}
    assert placed(arrive(scheduler, "r3", 900, 2.0)) == {"r3": "w0"}


def test_a_worker_that_is_warm_again_is_first_again() -> None:
    """The same few workers are in use again and again."""
    scheduler = scheduler_with(workers=2)
    scheduler.handle(e.WorkerWakeTimeChanged(1.0, "w0", 5.0))
    scheduler.handle(e.WorkerWakeTimeChanged(2.0, "w0", 0.0))
    assert placed(arrive(scheduler, "r1", 900, 3.0)) == {"r1": "w0"}
    finish(scheduler, "r1", 4.0)
    scheduler.handle(e.EpochStarted(5.0))
    assert placed(arrive(scheduler, "r2", 900, 6.0)) == {"r2": "w0"}


def test_a_wake_time_of_a_worker_in_use_or_unknown_harms_nothing() -> None:
    """A wake time may be reported late: its value counts when the worker sleeps."""
    scheduler = scheduler_with(workers=2)
    arrive(scheduler, "r1", 900, 1.0)
    assert scheduler.handle(e.WorkerWakeTimeChanged(2.0, "w0", 5.0)) == []
    assert scheduler.handle(e.WorkerWakeTimeChanged(2.0, "w9", 5.0)) == []
    finish(scheduler, "r1", 3.0)
    scheduler.handle(e.EpochStarted(4.0))
    assert placed(arrive(scheduler, "r2", 900, 5.0)) == {"r2": "w1"}


def test_a_negative_wake_time_is_refused() -> None:
    """Nonsense changes nothing."""
    with pytest.raises(ValueError, match="wakes in -1"):
        scheduler_with().handle(e.WorkerWakeTimeChanged(1.0, "w0", -1.0))
