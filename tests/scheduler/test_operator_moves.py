"""What an operator asks for is done where there is room, under every policy, and the policy's book follows."""

import pytest

from melld import events
from melld.ids import RequestId, WorkerId
from melld.scheduler.policies import POLICIES
from melld.scheduler.scheduler import Scheduler

A, B = WorkerId("a"), WorkerId("b")


def scheduler_with(policy: str, *sizes: int) -> Scheduler:
    scheduler = Scheduler(POLICIES[policy])
    for worker in (A, B):
        scheduler.handle(events.WorkerUp(0.0, worker=worker, capacity_bytes=100))
    for number, kv_bytes in enumerate(sizes):
        scheduler.handle(events.RequestArrived(0.0, request=RequestId(f"r{number}"), kv_bytes=kv_bytes))
    return scheduler


def home_of(scheduler: Scheduler, request: str) -> WorkerId:
    worker = scheduler.cluster.requests[RequestId(request)].worker
    assert worker is not None
    return worker.id


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kv_bytes", [3, 20, 40, 60])
@pytest.mark.parametrize("committed", [True, False])
def test_an_operators_move_is_made_and_reckoned_with(policy: str, kv_bytes: int, committed: bool) -> None:
    """The move is issued at once; whether it commits or not, the scheduler's sums go on holding."""
    scheduler = scheduler_with(policy, kv_bytes, 3)
    there = B if home_of(scheduler, "r0") == A else A
    asked = scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=there))
    moves = [command for command in asked if isinstance(command, events.MoveRequest) and command.request == "r0"]
    assert [(move.destination, move.cause) for move in moves] == [(there, "operator")]
    ended = events.MoveCommitted if committed else events.MoveAborted
    scheduler.handle(ended(2.0, request=RequestId("r0"), destination=there))
    assert (home_of(scheduler, "r0") == there) is committed
    for at_s in (3.0, 4.0):
        scheduler.handle(events.EpochStarted(at_s))
        scheduler.cluster.check()
    for request in ("r0", "r1"):
        scheduler.handle(events.RequestFinished(5.0, request=RequestId(request)))
    scheduler.handle(events.EpochStarted(6.0))
    scheduler.cluster.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_has_no_room_is_left_undone(policy: str) -> None:
    """An operator cannot overfill a worker."""
    scheduler = scheduler_with(policy, 60, 60)
    there = B if home_of(scheduler, "r0") == A else A
    asked = scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=there))
    assert not [command for command in asked if isinstance(command, events.MoveRequest)]
    scheduler.cluster.check()


def test_strangers_are_not_moved() -> None:
    """A request that has just ended, or a worker that is gone, is no error."""
    scheduler = scheduler_with("most-free", 10)
    assert scheduler.handle(events.MoveAsked(1.0, request=RequestId("nobody"), destination=A)) == []
    assert scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=WorkerId("c"))) == []


def test_a_worker_too_small_for_the_request_is_not_woken_for_it() -> None:
    """A GPU would start for a move that cannot be made."""
    scheduler = Scheduler(POLICIES["best-fit"])
    scheduler.handle(events.WorkerUp(0.0, worker=A, capacity_bytes=100))
    scheduler.handle(events.WorkerUp(0.0, worker=B, capacity_bytes=10))
    scheduler.handle(events.RequestArrived(0.0, request=RequestId("r0"), kv_bytes=50))
    assert scheduler.handle(events.MoveAsked(1.0, request=RequestId("r0"), destination=B)) == []
