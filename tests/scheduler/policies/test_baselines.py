"""The baselines: best fit, worst fit, and Llumnix's load balancing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.ids import WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.balance import freeness
from melld.scheduler.reasons import Reason
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.state import Worker
from tests.scheduler.driving import arrive, finish, lay_out, moved, of_kind, placed, scheduler_with


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
def test_each_baseline_places_an_arrival_as_it_should(policy: str, worker: str) -> None:
    """Best fit fills the fullest; the others spread."""
    assert {"new": worker} == placed(arrive(two_unequal_workers(policy), "new", 200))


@pytest.mark.parametrize(("policy", "beside"), [("best-fit", 500), ("worst-fit", 100)])
def test_a_request_that_must_leave_goes_to_another_awake_worker(policy: str, beside: int) -> None:
    """Its own worker is skipped even where it would be chosen."""
    scheduler = scheduler_with(policy=policy)
    lay_out(scheduler, {"leaver": 200, "other": beside}, {"third": 400})
    scheduler.cluster.take_commands()
    assert scheduler.policy.allocate(scheduler.cluster.requests["leaver"], Reason.DRAIN)
    assert moved(scheduler.cluster.take_commands()) == {"leaver": "w1"}


@pytest.mark.parametrize("policy", ["best-fit", "worst-fit", "load-balance"])
def test_no_worker_is_woken_while_an_awake_one_has_room(policy: str) -> None:
    """A GPU costs most while it is awake."""
    scheduler = scheduler_with(workers=3, policy=policy)
    commands = [c for name in "abcde" for c in arrive(scheduler, name, 200)]
    assert len(of_kind(commands, e.ActivateWorker)) == 1


@pytest.mark.parametrize("policy", ["best-fit", "worst-fit"])
def test_plain_fits_never_move_running_requests(policy: str) -> None:
    """The baselines never migrate."""
    scheduler = two_unequal_workers(policy)
    scheduler.handle(e.RequestsGrew(1.0, {"a": 900, "b": 600}))
    assert not moved(scheduler.handle(e.EpochStarted(1.0)))


def test_balancing_moves_the_smallest_from_the_least_free_to_the_freest() -> None:
    """A worker about to run out of room is cheaply relieved by the one with the most."""
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


def test_balancing_ignores_workers_that_are_neither_short_nor_ample() -> None:
    """No move without a reason."""
    scheduler = scheduler_with(policy="load-balance")
    for name, size in (("a", 500), ("b", 600), ("c", 300), ("d", 250)):
        arrive(scheduler, name, size)
    assert scheduler.handle(e.EpochStarted(1.0)) == []


@pytest.mark.parametrize(
    ("short", "ample", "moves"),
    [(1000, 959, True), (1000, 960, False), (995, 950, True), (980, 900, False)],
    ids=["full beside ample", "full beside not quite ample", "nearly full beside ample", "not short beside ample"],
)
def test_balancing_needs_a_short_worker_and_an_ample_one(short: int, ample: int, moves: bool) -> None:
    """Less than a hundredth of the memory per request is short, more than four is ample: Llumnix's thresholds."""
    scheduler = scheduler_with(policy="load-balance")
    lay_out(scheduler, {"small": 20, "large": short - 20}, {"other": ample})
    commands = scheduler.handle(e.EpochStarted(1.0))
    assert moved(commands) == ({"small": "w1"} if moves else {})
    assert [command.reason for command in of_kind(commands, e.MoveRequest)] == [Reason.BALANCE] * moves


@given(
    capacity=st.integers(1, 1000), used=st.integers(0, 1000), count=st.integers(0, 9), leaving=st.integers(0, 9),
    leaving_bytes=st.integers(0, 1000),
)  # fmt: skip
def test_freeness_is_free_memory_per_remaining_request(
    capacity: int, used: int, count: int, leaving: int, leaving_bytes: int
) -> None:
    """A worker that is being emptied counts as freer than one that is only as full."""
    worker = Worker(WorkerId("w0"), capacity, 9, 0, 1)
    worker.used_bytes, worker.leaving_bytes, worker.count, worker.leaving = used, leaving_bytes, count, leaving
    shares = count - leaving if count > leaving else 1
    assert freeness(worker) == pytest.approx((capacity - used + leaving_bytes) / capacity / shares)
