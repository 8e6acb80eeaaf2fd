"""What the records of workers and requests keep, and what their commands say."""

import pytest

from melld.ids import EventId, RequestId, WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import Cluster, ClusterSettings
from melld.scheduler.occupancy import Occupancy
from melld.scheduler.reasons import Reason
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.simulator.experiment import ALL_POLICIES
from tests.scheduler.driving import CAPACITY, arrive, finish, of_kind, placed, scheduler_with

CAUSE = EventId(7)


def test_every_command_names_its_subject_reason_and_event() -> None:
    """`melld why` tells a request's story from these words alone."""
    cluster = Cluster()
    cluster.event, cluster.now_s = CAUSE, 3.0
    one, other = (cluster.add_worker(e.WorkerUp(0.0, WorkerId(name), CAPACITY)) for name in ("w0", "w1"))
    for worker in (one, other):
        cluster.activate(worker, Reason.ARRIVAL)
    assert cluster.empty_workers() == [one, other]
    assert (one.order, other.order, one.empty_since_s) == (1, 2, 3.0)
    request = cluster.add_request(e.RequestArrived(2.0, RequestId("a"), 40, 4, -1, "key0"))
    assert (request.sequence, request.arrived_s, request.priority, request.prompt_tokens) == (1, 2.0, -1, 4)
    cluster.assign(request, one, Reason.ROOM)
    cluster.assign(request, other, Reason.OVERLOAD, 1.5)
    cluster.commit(request)
    cluster.retire(one, Reason.EMPTY)
    assert cluster.take_commands() == [
        e.ActivateWorker(Reason.ARRIVAL, one.id, cause=CAUSE),
        e.ActivateWorker(Reason.ARRIVAL, other.id, cause=CAUSE),
        e.PlaceRequest(Reason.ROOM, request.id, one.id, 40, cause=CAUSE),
        e.MoveRequest(Reason.OVERLOAD, request.id, one.id, other.id, 40, urgency_s=1.5, cause=CAUSE),
        e.RetireWorker(Reason.EMPTY, one.id, cause=CAUSE),
    ]
    assert cluster.take_commands() == []
    assert (request.placed_s, request.moved_s, request.client) == (3.0, 3.0, "key0")


def test_each_client_has_its_own_place_in_the_queue() -> None:
    """One key's thousand requests leave the other key's next one its turn."""
    scheduler = scheduler_with(workers=1)
    arrive(scheduler, "running", CAPACITY)
    for number, client in enumerate(("greedy", "greedy", "modest")):
        scheduler.handle(e.RequestArrived(0.0, RequestId(f"r{number}"), 900, 9, 0, client))
    served = [*placed(finish(scheduler, "running")), *placed(finish(scheduler, "r0"))]
    assert served == ["r0", "r2"]


def full_queue(**settings: object) -> Scheduler:
    """Return one full worker, and two waiting requests of one client."""
    scheduler = Scheduler(ALL_POLICIES["best-fit"], SchedulerSettings(ClusterSettings(), **settings))  # type: ignore[arg-type]
    scheduler.handle(e.WorkerUp(0.0, WorkerId("w0"), CAPACITY))
    arrive(scheduler, "running", CAPACITY)
    for number in range(2):
        scheduler.handle(e.RequestArrived(1.0 + number, RequestId(f"r{number}"), 900, 9, 0, "key0"))
    return scheduler


def test_a_full_queue_sheds_the_greediest_client_s_newest_request() -> None:
    """So that another client is still served; a request that would be shed is known before it is added."""
    scheduler = full_queue(max_waiting=2)
    assert scheduler.would_shed("key0", 0)
    assert not scheduler.would_shed("key0", -1)  # a more urgent one takes another's place
    commands = scheduler.handle(e.RequestArrived(3.0, RequestId("other"), 900, 9, -1, "key1"))
    assert [c.request for c in of_kind(commands, e.ShedRequest)] == ["r1"]
    assert [c.reason for c in of_kind(commands, e.ShedRequest)] == [Reason.QUEUE_FULL]
    finish(scheduler, "r0", 4.0)
    assert not scheduler.would_shed("key0", 0)
    assert not full_queue().would_shed("key0", 5)


def test_requests_beyond_their_deadline_are_shed_at_an_epoch() -> None:
    """To the second; and the request behind then has its turn."""
    scheduler = full_queue(wait_deadline_s=10.0)
    assert of_kind(scheduler.handle(e.EpochStarted(10.9)), e.ShedRequest) == []
    shed = of_kind(scheduler.handle(e.EpochStarted(11.0)), e.ShedRequest)
    assert [(c.request, c.reason) for c in shed] == [("r0", Reason.WAITED_TOO_LONG)]
    assert of_kind(full_queue().handle(e.EpochStarted(1e6)), e.ShedRequest) == []


def test_time_never_runs_backwards_and_a_refused_event_keeps_the_clock() -> None:
    """A bug in a caller must not reverse the order of the log."""
    scheduler = full_queue()
    with pytest.raises(ValueError, match=r"time runs backwards: 1.0 after 2.0"):
        scheduler.handle(e.EpochStarted(1.0))
    with pytest.raises(ValueError, match="-1 bytes"):
        arrive(scheduler, "negative", -1, 9.0)
    scheduler.handle(e.EpochStarted(2.0))


@pytest.mark.parametrize(
    "event",
    [
        e.WorkerUp(5.0, WorkerId("w9"), -1),
        e.WorkerUp(5.0, WorkerId("w9"), 0, -1),
        e.WorkerCapacityChanged(5.0, WorkerId("w0"), -1),
        e.WorkerSlotsChanged(5.0, WorkerId("w0"), -1),
    ],
)
def test_a_negative_size_is_refused_and_zero_is_valid(event: e.AnyEvent) -> None:
    """A worker that offers nothing is known and gets nothing."""
    scheduler = full_queue()
    with pytest.raises(ValueError, match="-1"):
        scheduler.handle(event)
    assert scheduler.handle(e.WorkerUp(5.0, WorkerId("none"), 0, 0)) == []
    assert scheduler.handle(e.WorkerCapacityChanged(5.0, WorkerId("w0"), 0)) == []
    assert scheduler.handle(e.WorkerSlotsChanged(5.0, WorkerId("w0"), 0)) == []
    assert (
        scheduler.cluster.workers[WorkerId("w0")].slots,
        scheduler.cluster.workers[WorkerId("w0")].capacity_bytes,
    ) == (
        0,
        0,
    )


def test_an_empty_request_is_valid() -> None:
    """Nothing to hold is no reason to refuse."""
    assert placed(arrive(scheduler_with(), "empty", 0)) == {"empty": "w0"}


def test_a_growing_request_counts_at_its_source_and_destination() -> None:
    """Both workers lose room at once, and the growth rate is that of each request."""
    cluster = Cluster()
    workers = [cluster.add_worker(e.WorkerUp(0.0, WorkerId(f"w{number}"), CAPACITY)) for number in range(12)]
    for worker in workers:
        cluster.activate(worker, Reason.ARRIVAL)
    home, goal = workers[3:5]
    moving, staying = (cluster.add_request(e.RequestArrived(0.0, RequestId(name), 10, 1)) for name in "ab")
    for request in (moving, staying):
        cluster.assign(request, home, Reason.ROOM)
    cluster.assign(moving, goal, Reason.OVERLOAD)
    assert [*cluster.room.roomiest()][-2:] == [goal, home]
    Occupancy.grow(cluster, {moving.id: 300, staying.id: 50})
    assert (home.growing, home.grown_bytes, home.used_bytes, goal.used_bytes) == (0, 0, 350, 300)
    assert moving.decodes, "a block more than its prompt: the time that this took is not known"
    Occupancy.grow(cluster, {moving.id: 310, staying.id: 70})
    assert (home.growing, home.grown_bytes, home.used_bytes, goal.used_bytes) == (2, 30, 380, 310)
    Occupancy.grow(cluster, {staying.id: 80})
    assert (home.growing, home.grown_bytes) == (3, 40)
    assert [*cluster.room.roomiest()][-2:] == [goal, home]
    assert next(cluster.room.tightest(CAPACITY - 310)) is goal
    cluster.remove_worker(home)
    assert not staying.decodes, "it computes its prompt anew"


def test_a_wake_time_dates_from_its_last_change() -> None:
    """A move that waited for the destination's start says nothing of how long moves take."""
    scheduler = scheduler_with(workers=1)
    worker = scheduler.cluster.workers[WorkerId("w0")]
    scheduler.handle(e.WorkerWakeTimeChanged(5.0, worker.id, 2.5))
    assert (worker.wake_s, worker.ready_s) == (2.5, 5.0)
    scheduler.handle(e.WorkerWakeTimeChanged(6.0, worker.id, 2.5))
    assert worker.ready_s == 5.0


def test_a_worker_without_slots_is_not_woken_for_an_operator() -> None:
    """It would stay awake for nobody."""
    scheduler = scheduler_with(workers=1)
    arrive(scheduler, "a", 10)
    scheduler.handle(e.WorkerUp(0.0, WorkerId("w1"), CAPACITY, 0))
    assert scheduler.handle(e.MoveAsked(1.0, RequestId("a"), WorkerId("w1"))) == []


def test_room_on_a_dead_worker_is_not_its_successor_s() -> None:
    """Else requests are counted on the dead one's record, and the living one's memory is given out twice."""
    cluster = Cluster()
    for number in range(6):
        cluster.activate(cluster.add_worker(e.WorkerUp(0.0, WorkerId(f"w{number}"), CAPACITY)), Reason.SERVICE)
    assert list(cluster.room.tightest(0)) == list(cluster.active.values())
    cluster.remove_worker(cluster.workers[WorkerId("w5")])
    cluster.activate(cluster.add_worker(e.WorkerUp(1.0, WorkerId("w5"), CAPACITY)), Reason.SERVICE)
    assert list(cluster.room.tightest(0)) == list(cluster.active.values())
