"""The scheduler's shell around every policy: the queue, refusals, workers that die, drain and retire."""

import pytest

from melld.errors import IllegalTransition
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from tests.scheduler.driving import CAPACITY, arrive, finish, moved, of_kind, placed, scheduler_with
from tests.scheduler.law import check_cluster


def test_a_request_that_can_never_fit_is_refused_and_forgotten() -> None:
    """The client gets its answer at once instead of waiting indefinitely."""
    scheduler = scheduler_with()
    answer = arrive(scheduler, "huge", CAPACITY + 1)
    assert [e.RefuseRequest("too large", "huge", CAPACITY + 1, CAPACITY)] == answer
    assert not scheduler.cluster.requests


def test_a_request_of_exactly_the_capacity_is_served() -> None:
    """The limit is what the worker has, not less."""
    assert placed(arrive(scheduler_with(), "all", CAPACITY)) == {"all": "w0"}


def test_requests_wait_while_no_worker_is_known() -> None:
    """Those that come before the first worker is up are served once it is."""
    scheduler = scheduler_with(workers=0)
    assert [e.QueueRequest("no room", "early")] == arrive(scheduler, "early", 10)
    assert placed(scheduler.handle(e.WorkerUp(1.0, "w", CAPACITY))) == {"early": "w"}


def test_the_queue_goes_by_priority_then_arrival() -> None:
    """No request overtakes an equal one."""
    scheduler = scheduler_with(workers=1)
    arrive(scheduler, "running", CAPACITY)
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        arrive(scheduler, name, CAPACITY // 2, priority=priority)
    assert list(placed(finish(scheduler, "running"))) == ["urgent", "first"]
    finish(scheduler, "urgent")
    assert list(placed(finish(scheduler, "first"))) == ["late"]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    """A large request is not starved by small ones that would fit beside the running ones."""
    scheduler = scheduler_with(workers=1)
    arrive(scheduler, "running", 600)
    arrive(scheduler, "large", 900)
    assert [e.QueueRequest("no room", "small")] == arrive(scheduler, "small", 100)


def test_displaced_requests_go_before_newcomers() -> None:
    """A stream that has begun is resumed before new ones begin."""
    scheduler = scheduler_with(workers=2)
    arrive(scheduler, "a", CAPACITY)
    arrive(scheduler, "b", CAPACITY)
    arrive(scheduler, "new", CAPACITY)
    assert [e.QueueRequest("no room", "a")] == scheduler.handle(e.WorkerDown(1.0, "w0"))
    assert list(placed(finish(scheduler, "b", 1.0))) == ["a"]


def test_a_dead_worker_s_requests_are_placed_elsewhere_at_once() -> None:
    """A crash costs a prefill, not the request."""
    scheduler = scheduler_with()
    arrive(scheduler, "a", 400)
    arrive(scheduler, "b", 300)
    commands = scheduler.handle(e.WorkerDown(1.0, "w0"))
    assert placed(commands) == {"a": "w1", "b": "w1"}
    assert isinstance(commands[0], e.ActivateWorker)


def test_a_dead_source_or_destination_ends_the_move() -> None:
    """No worker keeps bytes for an impossible move."""
    for dead, expected in (("w0", {"a": "w1"}), ("w1", {})):
        scheduler = scheduler_with()
        arrive(scheduler, "a", 400)
        assert moved(scheduler.handle(e.WorkerDraining(0.0, "w0"))) == {"a": "w1"}
        assert expected == placed(scheduler.handle(e.WorkerDown(1.0, dead)))
        check_cluster(scheduler.cluster)


def test_a_late_answer_to_an_old_move_does_not_affect_the_new_one() -> None:
    """After a crash, what the old destination still says changes nothing."""
    scheduler = scheduler_with(workers=3)
    arrive(scheduler, "a", 400)
    scheduler.handle(e.WorkerDraining(0.0, "w0"))
    scheduler.handle(e.WorkerDown(1.0, "w1"))
    assert moved(scheduler.handle(e.EpochStarted(2.0))) == {"a": "w2"}
    scheduler.handle(e.MoveCommitted(3.0, "a", "w1"))
    assert scheduler.cluster.requests["a"].worker.id == "w0"
    scheduler.handle(e.MoveCommitted(4.0, "a", "w2"))
    assert scheduler.cluster.requests["a"].worker.id == "w2"


def test_a_request_that_ends_during_a_move_frees_both_workers() -> None:
    """Nothing leaks, and the move's own end is then ignored."""
    scheduler = scheduler_with()
    arrive(scheduler, "a", 400)
    scheduler.handle(e.WorkerDraining(0.0, "w0"))
    finish(scheduler, "a", 1.0)
    assert scheduler.handle(e.MoveCommitted(1.0, "a")) == []
    assert finish(scheduler, "a", 1.0) == []
    assert [worker.used_bytes for worker in scheduler.cluster.workers.values()] == [0, 0]


def test_a_draining_worker_is_emptied_then_retired_and_gets_nothing() -> None:
    """An operator can take a GPU out of service without breaking a stream."""
    scheduler = scheduler_with()
    arrive(scheduler, "a", 400)
    commands = scheduler.handle(e.WorkerDraining(1.0, "w0"))
    assert moved(commands) == {"a": "w1"}
    assert placed(arrive(scheduler, "b", 100, 1.0)) == {"b": "w1"}
    scheduler.handle(e.MoveCommitted(2.0, "a"))
    assert [e.RetireWorker("drained", "w0")] == scheduler.handle(e.EpochStarted(3.0))
    assert [e.QueueRequest("no room", "c")] == arrive(scheduler, "c", 900, 4.0)
    assert placed(scheduler.handle(e.WorkerResumed(5.0, "w0"))) == {"c": "w0"}


def test_a_drain_proceeds_beside_a_request_that_no_worker_could_hold() -> None:
    """Requests that wait for a lost or draining worker do not block another one's drain."""
    scheduler = scheduler_with(workers=2)
    scheduler.handle(e.WorkerUp(0.0, "large", 5000))
    arrive(scheduler, "a", 300)
    arrive(scheduler, "long", 4000)
    scheduler.handle(e.WorkerDown(1.0, "large"))
    assert list(scheduler.cluster.waiting.requests) == ["long"]
    assert moved(scheduler.handle(e.WorkerDraining(2.0, "w0"))) == {"a": "w1"}


def test_a_drain_waits_for_room_and_for_waiting_requests() -> None:
    """A request that cannot move keeps running; none moves while another has no worker at all."""
    scheduler = scheduler_with()
    arrive(scheduler, "a", 600)
    arrive(scheduler, "b", 600)
    assert scheduler.handle(e.WorkerDraining(0.0, "w0")) == []
    arrive(scheduler, "waiting", 700)
    finish(scheduler, "b", 1.0)
    assert scheduler.cluster.requests["waiting"].worker.id == "w1"
    finish(scheduler, "waiting", 2.0)
    assert moved(scheduler.handle(e.EpochStarted(3.0))) == {"a": "w1"}


def test_a_request_that_currently_fits_nowhere_does_not_block_the_queue() -> None:
    """While the only large worker is drained, requests for the others are still served."""
    scheduler = scheduler_with(workers=1)
    scheduler.handle(e.WorkerUp(0.0, "large", 5000))
    scheduler.handle(e.WorkerDraining(0.0, "large"))
    arrive(scheduler, "big", 3000)
    assert placed(arrive(scheduler, "small", 100)) == {"small": "w0"}
    assert placed(scheduler.handle(e.WorkerResumed(1.0, "large"))) == {"big": "large"}


def test_a_request_that_currently_fits_nowhere_costs_the_policy_nothing() -> None:
    """While a model's only worker is drained a thousand may wait, and each event would ask about each of them."""
    scheduler = scheduler_with(workers=1)
    scheduler.handle(e.WorkerDraining(0.0, "w0"))
    for name in "abc":
        arrive(scheduler, name, 100)
    allocate, asked = scheduler.policy.allocate, list[str]()
    scheduler.policy.allocate = lambda request, reason: asked.append(request.id) or allocate(request, reason)
    scheduler.handle(e.EpochStarted(1.0))
    assert asked == []
    scheduler.handle(e.WorkerResumed(2.0, "w0"))
    assert asked == ["a", "b", "c"]


def test_a_policy_failure_on_one_request_costs_no_other_its_turn() -> None:
    """Whoever was passed over before it is still next."""
    scheduler = scheduler_with(1)
    scheduler.handle(e.WorkerCapacityChanged(0.0, "w0", 100))
    arrive(scheduler, "large", 500)
    scheduler.policy.allocate = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        arrive(scheduler, "small", 50)
    assert scheduler.cluster.waiting.head(0.0) == "large"


def test_an_empty_worker_is_retired_after_the_delay() -> None:
    """A worker about to be needed again does not sleep."""
    scheduler = scheduler_with(cluster=ClusterSettings(retire_after_s=10.0))
    arrive(scheduler, "a", 400)
    finish(scheduler, "a", 5.0)
    assert scheduler.handle(e.EpochStarted(14.0)) == []
    assert [e.RetireWorker("empty", "w0")] == scheduler.handle(e.EpochStarted(15.0))


def test_slots_are_respected_like_bytes() -> None:
    """A worker with all slots taken is full, whatever memory it has left."""
    scheduler = scheduler_with(slots=2)
    names = [f"r{number}" for number in range(5)]
    commands = [command for name in names for command in arrive(scheduler, name, 1)]
    assert placed(commands) == {"r0": "w0", "r1": "w0", "r2": "w1", "r3": "w1"}
    assert [e.QueueRequest("no room", "r4")] == of_kind(commands, e.QueueRequest)
    assert placed(scheduler.handle(e.WorkerSlotsChanged(1.0, "w0", 3))) == {"r4": "w0"}


def test_lost_capacity_is_not_used_and_returned_capacity_is() -> None:
    """When another process takes GPU memory, the scheduler lives with what is left."""
    scheduler = scheduler_with(workers=1)
    scheduler.handle(e.WorkerCapacityChanged(0.0, "w0", 300))
    assert [e.QueueRequest("no room", "a")] == arrive(scheduler, "a", 400)
    assert placed(scheduler.handle(e.WorkerCapacityChanged(1.0, "w0", 1000))) == {"a": "w0"}


def test_fit_is_judged_one_horizon_ahead() -> None:
    """Room that running requests are about to take is not given away."""
    scheduler = scheduler_with(workers=2, cluster=ClusterSettings(horizon_s=10.0))
    arrive(scheduler, "a", 400)
    for second in range(4):
        scheduler.handle(e.RequestsGrew(float(second), {"a": 400 + 10 * second}))
    assert placed(arrive(scheduler, "b", 450, 3.0)) == {"b": "w1"}
    assert placed(arrive(scheduler, "c", 360, 3.0)) == {"c": "w0"}


@pytest.mark.parametrize(
    "event",
    [
        e.RequestArrived(1.0, "a", 5),
        e.WorkerUp(1.0, "w0", 5),
        e.WorkerDraining(1.0, "unknown"),
        e.WorkerResumed(1.0, "unknown"),
    ],
)
def test_an_impossible_event_raises_and_changes_nothing(event: e.AnyEvent) -> None:
    """A bug elsewhere gets an error that says where, and the scheduler's records stay right."""
    scheduler = scheduler_with()
    arrive(scheduler, "a", 400)
    with pytest.raises(IllegalTransition):
        scheduler.handle(event)
    check_cluster(scheduler.cluster)
    assert placed(arrive(scheduler, "b", 100, 0.5)) == {"b": "w0"}


@pytest.mark.parametrize(
    "event",
    [
        e.EpochStarted(0.5),
        e.RequestArrived(2.0, "b", -1),
        e.WorkerUp(2.0, "w9", -1),
        e.WorkerCapacityChanged(2.0, "w0", -1),
        e.WorkerSlotsChanged(2.0, "w0", -1),
    ],
)
def test_impossible_times_and_sizes_raise_and_change_nothing(event: e.AnyEvent) -> None:
    """Garbage is refused at the door."""
    scheduler = scheduler_with()
    arrive(scheduler, "a", 400, at_s=1.0)
    with pytest.raises(ValueError, match=r"backwards|bytes"):
        scheduler.handle(event)
    check_cluster(scheduler.cluster)
    assert placed(arrive(scheduler, "b", 100, 1.0)) == {"b": "w0"}


@pytest.mark.parametrize(
    "event",
    [
        e.RequestFinished(1.0, "unknown"),
        e.RequestsGrew(1.0, {"unknown": 5, "a": 399}),
        e.RequestPreempted(1.0, "a"),
        e.MoveCommitted(1.0, "a"),
        e.MoveAborted(1.0, "unknown"),
        e.WorkerDown(1.0, "unknown"),
        e.WorkerCapacityChanged(1.0, "unknown", 5),
        e.WorkerResumed(1.0, "w0"),
    ],
)
def test_a_late_or_repeated_message_is_ignored(event: e.AnyEvent) -> None:
    """Messages cross on the wire; hearing a thing twice changes nothing."""
    scheduler = scheduler_with()
    arrive(scheduler, "a", 400)
    assert scheduler.handle(event) == []
    check_cluster(scheduler.cluster)
    assert scheduler.cluster.requests["a"].kv_bytes == 400
