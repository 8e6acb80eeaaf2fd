"""An operator's move is made where there is room, under every policy, and the policy accounts for it."""

import pytest

from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.scheduler import Scheduler
from melld.simulator.experiment import ALL_POLICIES
from tests.scheduler.law import check_cluster

A, B = WorkerId("a"), WorkerId("b")


def scheduler_with(policy: str, *sizes: int) -> Scheduler:
    scheduler = Scheduler(ALL_POLICIES[policy])
    for worker in (A, B):
        scheduler.handle(events.WorkerUp(0.0, worker=worker, capacity_bytes=100))
    for number, kv_bytes in enumerate(sizes):
        scheduler.handle(events.RequestArrived(0.0, request=RequestId(f"r{number}"), kv_bytes=kv_bytes))
    return scheduler


def home_of(scheduler: Scheduler, request: str) -> WorkerId:
    worker = scheduler.cluster.requests[RequestId(request)].worker
    assert worker is not None
    return worker.id


@pytest.mark.parametrize("policy", sorted(ALL_POLICIES))
@pytest.mark.parametrize("kv_bytes", [3, 20, 40, 60])
@pytest.mark.parametrize("committed", [True, False])
def test_an_operator_s_move_is_made_and_accounted_for(policy: str, kv_bytes: int, committed: bool) -> None:
    """It is issued at once; whether it commits or not, the scheduler's sums stay right."""
    scheduler = scheduler_with(policy, kv_bytes, 3)
    there = B if home_of(scheduler, "r0") == A else A
    asked = scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=there))
    moves = [command for command in asked if isinstance(command, events.MoveRequest) and command.request == "r0"]
    assert [(move.destination, move.reason) for move in moves] == [(there, "operator")]
    ended = events.MoveCommitted if committed else events.MoveAborted
    scheduler.handle(ended(2.0, request=RequestId("r0"), destination=there))
    assert (home_of(scheduler, "r0") == there) is committed
    for at_s in (3.0, 4.0):
        scheduler.handle(events.EpochStarted(at_s))
        check_cluster(scheduler.cluster)
    for request in ("r0", "r1"):
        scheduler.handle(events.RequestFinished(5.0, request=RequestId(request)))
    scheduler.handle(events.EpochStarted(6.0))
    check_cluster(scheduler.cluster)


@pytest.mark.parametrize("policy", sorted(ALL_POLICIES))
def test_a_move_without_room_is_not_made(policy: str) -> None:
    """An operator cannot overfill a worker."""
    scheduler = scheduler_with(policy, 60, 60)
    there = B if home_of(scheduler, "r0") == A else A
    asked = scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=there))
    assert not [command for command in asked if isinstance(command, events.MoveRequest)]
    check_cluster(scheduler.cluster)


def live_on(scheduler: Scheduler, from_s: int) -> None:
    """Play a minute in which all grow a little, and every policy could change its mind."""
    for tenth in range(600):
        at_s = from_s + tenth / 10
        grown = {one.id: one.kv_bytes + (tenth % 50 == 0) for one in scheduler.cluster.requests.values()}
        scheduler.handle(events.RequestsGrew(at_s, kv_bytes=grown))
        for command in scheduler.handle(events.EpochStarted(at_s)):
            if isinstance(command, events.MoveRequest):
                scheduler.handle(events.MoveCommitted(at_s, command.request, command.destination))


@pytest.mark.parametrize("policy", sorted(ALL_POLICIES))
@pytest.mark.parametrize("kv_bytes", [3, 20, 24])
def test_an_operator_s_move_holds_until_the_worker_drains(policy: str, kv_bytes: int) -> None:
    """A request stays where the operator sent it, and the worker can still be drained."""
    scheduler = scheduler_with(policy, kv_bytes, 25)
    there = B if home_of(scheduler, "r0") == A else A
    scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=there))
    scheduler.handle(events.MoveCommitted(2.0, request=RequestId("r0"), destination=there))
    live_on(scheduler, 3)
    assert home_of(scheduler, "r0") == there
    assert scheduler.cluster.requests[RequestId("r0")].pinned
    moved = [
        command.request
        for command in scheduler.handle(events.WorkerDraining(100.0, worker=there))
        if isinstance(command, events.MoveRequest)
    ]
    assert "r0" in moved
    assert not scheduler.cluster.requests[RequestId("r0")].pinned


@pytest.mark.parametrize("policy", sorted(ALL_POLICIES))
def test_a_request_can_be_pinned_where_it_is(policy: str) -> None:
    """Moved to its own worker, it stays there from then on; another operator's move moves it."""
    scheduler = scheduler_with(policy, 3, 3)
    home = home_of(scheduler, "r0")
    assert scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=home)) == []
    live_on(scheduler, 3)
    assert home_of(scheduler, "r0") == home
    other = B if home == A else A
    asked = scheduler.handle(events.MoveAsked(70.0, request=RequestId("r0"), destination=other))
    assert [command.reason for command in asked if isinstance(command, events.MoveRequest)] == ["operator"]


@pytest.mark.parametrize("policy", sorted(ALL_POLICIES))
def test_a_failed_move_or_a_dead_worker_unpins_the_request(policy: str) -> None:
    """The operator need not undo anything."""
    scheduler = scheduler_with(policy, 20)
    there = B if home_of(scheduler, "r0") == A else A
    scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=there))
    scheduler.handle(events.MoveAborted(2.0, RequestId("r0"), "it failed", there))
    assert not scheduler.cluster.requests[RequestId("r0")].pinned
    scheduler.handle(events.MoveAsked(3.0, request=RequestId("r0"), destination=there))
    scheduler.handle(events.MoveCommitted(4.0, request=RequestId("r0"), destination=there))
    scheduler.handle(events.WorkerDown(5.0, worker=there))
    assert not scheduler.cluster.requests[RequestId("r0")].pinned
    assert home_of(scheduler, "r0") != there


def test_unknown_requests_are_not_moved() -> None:
    """A request that has just ended, or a worker that is gone, is no error."""
    scheduler = scheduler_with("most-free", 10)
    assert scheduler.handle(events.MoveAsked(1.0, request=RequestId("nobody"), destination=A)) == []
    assert scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=WorkerId("c"))) == []


def test_a_worker_too_small_for_the_request_is_not_woken_for_it() -> None:
    """A GPU would start for a move that cannot be made."""
    scheduler = Scheduler(ALL_POLICIES["best-fit"])
    scheduler.handle(events.WorkerUp(0.0, worker=A, capacity_bytes=100))
    scheduler.handle(events.WorkerUp(0.0, worker=B, capacity_bytes=10))
    scheduler.handle(events.RequestArrived(0.0, request=RequestId("r0"), kv_bytes=50))
    assert scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=B)) == []
