"""Under any policy, a worker that died recently gets only overflow until it has worked for a while."""

import pytest

from melld.scheduler import events as e
from melld.scheduler.scheduler import Scheduler
from melld.simulator.experiment import ALL_POLICIES
from tests.scheduler.driving import CAPACITY, arrive, finish, moved, placed, scheduler_with


@pytest.fixture(params=sorted(ALL_POLICIES))
def shaken(request: pytest.FixtureRequest) -> Scheduler:
    """Return two workers, of which w0 has just come back after it died."""
    scheduler = scheduler_with(2, request.param)
    scheduler.handle(e.WorkerDown(0.0, "w0"))
    scheduler.handle(e.WorkerUp(0.0, "w0", CAPACITY, 100, steady=False))
    return scheduler


def test_others_are_preferred_to_a_recently_dead_worker(shaken: Scheduler) -> None:
    """A GPU that loads, crashes, and loads again does not take one request after the other with it."""
    places = [placed(arrive(shaken, f"r{number}", 200)) for number in range(5)]
    assert [*places[0].values()] == ["w1"]
    assert {worker for place in places for worker in place.values()} == {"w1"}
    shaken.handle(e.EpochStarted(1.0))
    assert shaken.cluster.workers["w0"].count == 0


def test_a_recently_dead_worker_is_better_than_waiting(shaken: Scheduler) -> None:
    """Requests that fit nowhere else go there at once: none waits beside a ready worker."""
    assert placed(arrive(shaken, "large", CAPACITY)) == {"large": "w1"}
    assert placed(arrive(shaken, "next", 200)) == {"next": "w0"}


def test_a_lone_worker_serves_as_ever(shaken: Scheduler) -> None:
    """With one GPU there is nothing to prefer."""
    shaken.handle(e.WorkerDown(0.0, "w1"))
    assert placed(arrive(shaken, "r1", 200)) == {"r1": "w0"}
    finish(shaken, "r1")
    assert placed(arrive(shaken, "r2", CAPACITY)) == {"r2": "w0"}


def test_a_worker_that_has_worked_long_enough_is_as_good_as_any(shaken: Scheduler) -> None:
    """The past is forgotten; for a steady or departed worker the report changes nothing."""
    assert placed(arrive(shaken, "large", CAPACITY)) == {"large": "w1"}
    for name in ("w0", "w0", "w1", "w9"):
        shaken.handle(e.WorkerSteadied(1.0, name))
    assert shaken.cluster.workers["w0"].slots == 100
    assert placed(arrive(shaken, "next", 200, 1.0)) == {"next": "w0"}


def test_fewer_slots_do_not_open_an_unsteady_worker(shaken: Scheduler) -> None:
    """A limit of slots is recorded for an unsteady worker and counts once the worker is used."""
    shaken.handle(e.WorkerSlotsChanged(0.0, "w0", 1))
    assert placed(arrive(shaken, "r1", 200)) == {"r1": "w1"}
    shaken.handle(e.WorkerSteadied(1.0, "w0"))
    assert shaken.cluster.workers["w0"].slots == 1


def test_an_operator_may_move_a_request_to_an_unsteady_worker(shaken: Scheduler) -> None:
    """By name, to test whether it works."""
    arrive(shaken, "r1", 200)
    assert moved(shaken.handle(e.MoveAsked(0.0, "r1", "w0"))) == {"r1": "w0"}
