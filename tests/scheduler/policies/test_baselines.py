"""Promises of the baselines: best fit, worst fit, and Llumnix's load balancing."""

import pytest

from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.scheduler import Scheduler
from tests.scheduler.driving import arrive, finish, moved, of_kind, placed, scheduler_with


def two_unequal_workers(policy: str) -> Scheduler:
    """w0 holds 700 of 1000 bytes, w1 500."""
    scheduler = scheduler_with(policy=policy, cluster=ClusterSettings(instant_moves=True))
    for name, size in (("a", 600), ("b", 500), ("c", 100)):
        arrive(scheduler, name, size)
    worker_of_c = scheduler.cluster.requests["c"].worker.id
    if worker_of_c != "w0":
        finish(scheduler, "c")
        scheduler.handle(e.RequestsGrew(0.0, {"a": 700}))
    return scheduler


@pytest.mark.parametrize(("policy", "worker"), [("best-fit", "w0"), ("worst-fit", "w1"), ("load-balance", "w1")])
def test_where_an_arrival_goes(policy: str, worker: str) -> None:
    """Best fit fills what is fullest; the others spread."""
    assert {"new": worker} == placed(arrive(two_unequal_workers(policy), "new", 200))


@pytest.mark.parametrize("policy", ["best-fit", "worst-fit", "load-balance"])
def test_no_worker_is_woken_while_one_that_is_awake_has_room(policy: str) -> None:
    """A GPU costs most while it is awake."""
    scheduler = scheduler_with(workers=3, policy=policy)
    commands = [c for name in "abcde" for c in arrive(scheduler, name, 200)]
    assert len(of_kind(commands, e.ActivateWorker)) == 1


@pytest.mark.parametrize("policy", ["best-fit", "worst-fit"])
def test_plain_fits_never_move_what_runs(policy: str) -> None:
    """The baselines never migrate."""
    scheduler = two_unequal_workers(policy)
    scheduler.handle(e.RequestsGrew(1.0, {"a": 900, "b": 600}))
    assert not moved(scheduler.handle(e.EpochStarted(1.0)))


def test_balancing_moves_the_smallest_from_the_least_free_to_the_freest() -> None:
    """A worker about to run out of room is relieved by the one with the most, cheaply."""
    scheduler = scheduler_with(policy="load-balance")
    for name, size in (("a", 505), ("b", 500), ("c", 480), ("d", 300)):
        arrive(scheduler, name, size)
    scheduler.handle(e.RequestsGrew(0.0, {"b": 510}))
    assert {worker.id: sorted(worker.requests) for worker in scheduler.cluster.active.values()} == {
        "w0": ["a", "d"],
        "w1": ["b", "c"],
    }
    assert not moved(scheduler.handle(e.EpochStarted(1.0)))
    finish(scheduler, "a", 1.0)
    assert moved(scheduler.handle(e.EpochStarted(2.0))) == {"c": "w0"}


def test_balancing_leaves_workers_alone_that_are_neither_short_nor_ample() -> None:
    """No move without a reason."""
    scheduler = scheduler_with(policy="load-balance")
    for name, size in (("a", 500), ("b", 600), ("c", 300), ("d", 250)):
        arrive(scheduler, name, size)
    assert scheduler.handle(e.EpochStarted(1.0)) == []
