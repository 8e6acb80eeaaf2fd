"""Promises: room is made for a large request at the queue's head, kept for it, and released if that takes too long."""

from melld.cli.why import in_words
from melld.decisions.records import decision_record, fact_records
from melld.decisions.stories import stories_of
from melld.ids import RequestId, WorkerId
from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.making_room import MOST_ABORTED, MOST_S
from melld.scheduler.priorities import Priorities
from melld.scheduler.reasons import Reason
from melld.scheduler.scheduler import Scheduler
from tests.scheduler.driving import arrive, finish, lay_out, moved, of_kind, placed, scheduler_with


def fragmented(hole_s: float = 2.0) -> Scheduler:
    """Return three workers with 400 bytes free each: together enough for a request of 700."""
    cluster = ClusterSettings(priorities=Priorities(hole_s=hole_s))
    scheduler = scheduler_with(3, "mell-plus", cluster=cluster)
    lay_out(scheduler, {"a": 350, "b": 250}, {"c": 300, "d": 300}, {"e": 200, "f": 400})
    return scheduler


def queue(scheduler: Scheduler, name: str, kv_bytes: int, at_s: float = 0.0) -> list[e.AnyCommand]:
    """Add a request that finds no room and waits until the next epoch."""
    assert of_kind(arrive(scheduler, name, kv_bytes, at_s), e.QueueRequest)
    return scheduler.handle(e.EpochStarted(at_s))


def promised(commands: list[e.AnyCommand]) -> dict[str, str]:
    """Return the promises: request to worker."""
    return {c.request: c.worker for c in of_kind(commands, e.PromiseRoom)}


def commit(scheduler: Scheduler, request: str, at_s: float) -> list[e.AnyCommand]:
    """Commit a move."""
    return scheduler.handle(e.MoveCommitted(at_s, RequestId(request)))


def test_the_smallest_sufficient_request_leaves_for_a_large_one() -> None:
    """300 bytes must go: one of 300 does; an arrival that would fill the hole meanwhile goes elsewhere."""
    scheduler = fragmented()
    commands = queue(scheduler, "large", 700)
    assert moved(commands).keys() == {"c"}
    assert promised(commands) == {"large": "w1"}
    other = arrive(scheduler, "other", 120, 0.1)
    assert set(placed(other).values()) <= {"w0", "w2"}
    assert len(placed(other)) == 1
    assert placed(commit(scheduler, "c", 0.2)) == {"large": "w1"}
    assert scheduler.cluster.workers[WorkerId("w1")].promised_bytes == 0


def test_room_kept_for_an_ended_request_is_free_at_once() -> None:
    """Its client has left, and nobody else waits: an arrival that needs the room does not wait for the next epoch."""
    scheduler = fragmented()
    queue(scheduler, "large", 700)
    assert placed(arrive(scheduler, "fill", 400, 0.1)) == {"fill": "w2"}
    finish(scheduler, "large", 0.1)
    assert placed(arrive(scheduler, "other", 350, 0.1)) == {"other": "w1"}


def test_the_log_records_a_promise() -> None:
    """`melld why` says for whom room is made, and where."""
    commands = queue(fragmented(), "large", 700)
    arrived = fact_records(e.RequestArrived(0.0, RequestId("large"), 700, 700))
    records = arrived + [decision_record(1.0, command) for command in commands]
    text = in_words(stories_of(records).story("large"))
    assert "memory reserved on w1" in text


def test_several_leave_only_if_no_single_one_suffices_and_all_fit() -> None:
    """All or nothing: where one of two has no taker, nothing moves and the queue waits."""
    scheduler = scheduler_with(2, "mell-plus")
    lay_out(scheduler, {"a": 200, "b": 200, "c": 500}, {"d": 550})
    assert not moved(queue(scheduler, "larger", 560))  # two of 200 are not enough, and none takes the one of 500
    finish(scheduler, "larger")
    assert moved(queue(scheduler, "large", 480, 1.0)) == {"a": "w1", "b": "w1"}


def test_a_small_request_waits_without_a_promise() -> None:
    """Below an eighth of a worker no request moves for it."""
    scheduler = scheduler_with(2, "mell-plus")
    lay_out(scheduler, {"a": 900, "b": 20}, {"c": 950})
    assert not moved(queue(scheduler, "small", 95))
    assert of_kind(arrive(scheduler, "next", 5, 1.0), e.PlaceRequest) == []


def test_with_promises_switched_off_nothing_moves() -> None:
    """`hole_s` 0."""
    assert queue(fragmented(hole_s=0.0), "large", 700) == []


def test_a_promise_ends_on_time_and_after_aborts() -> None:
    """The room is everybody's again, and the queue is served in order once more."""
    scheduler = fragmented()
    queue(scheduler, "large", 700)
    worker = scheduler.cluster.workers[WorkerId("w1")]
    scheduler.handle(e.EpochStarted(MOST_S))
    assert worker.promised_bytes == 700
    finish(scheduler, "large", MOST_S)
    scheduler.handle(e.EpochStarted(MOST_S + 0.1))
    assert worker.promised_bytes == 0

    scheduler = fragmented()
    queue(scheduler, "large", 700)
    worker = scheduler.cluster.workers[WorkerId("w1")]
    for _ in range(MOST_ABORTED):
        scheduler._queueing.promises.aborted(RequestId("c"))
    scheduler._queueing.promises.due()
    assert worker.promised_bytes == 0


def test_two_broken_promises_are_the_last() -> None:
    """Others pass while one stands; after the second none does, or a large request could wait forever."""
    scheduler = fragmented()
    found = [promised(queue(scheduler, "large", 700))]
    for at_s in (6.0, 12.0, 18.0):
        small = f"small{at_s}"
        placed_small = placed(arrive(scheduler, small, 20, at_s - 5.0))
        assert (small in placed_small) == (at_s < 18.0)
        for name, one in list(scheduler.cluster.requests.items()):
            if one.destination is not None:
                scheduler.handle(e.MoveAborted(at_s - 4.0, name))
        found.append(promised(scheduler.handle(e.EpochStarted(at_s))))
    assert [one.keys() for one in found] == [{"large"}, {"large"}, set(), set()]


def test_a_promise_dies_with_its_worker() -> None:
    """Another hole is sought, or the request waits for room like others."""
    scheduler = fragmented()
    queue(scheduler, "large", 700)
    scheduler.handle(e.WorkerDown(1.0, WorkerId("w1")))
    scheduler.handle(e.WorkerUp(2.0, WorkerId("w1"), 1000, 100))
    assert scheduler.cluster.workers[WorkerId("w1")].promised_bytes == 0


def test_while_a_promise_stands_holes_are_sought_rarely() -> None:
    """A search takes milliseconds where many run, and events come by the hundred per second."""
    scheduler = fragmented()
    queue(scheduler, "large", 700)
    hole, asked = scheduler.policy.hole, list[str]()
    scheduler.policy.hole = lambda request, most_s: asked.append(request.id) or hole(request, most_s)
    arrive(scheduler, "high", 450, 1.0, priority=-1)
    for at_s in (1.0, 1.05, 1.09):
        scheduler.handle(e.EpochStarted(at_s))
    assert asked == ["high"]
    scheduler.handle(e.EpochStarted(1.2))
    assert asked == ["high", "high"]


def test_a_dead_worker_s_promise_ends_whatever_its_successor() -> None:
    """Else others pass the large request for seconds, for room that will never be."""
    scheduler = fragmented()
    queue(scheduler, "large", 700)
    dead = scheduler.cluster.workers[WorkerId("w1")]
    scheduler.handle(e.WorkerDown(0.1, dead.id))
    scheduler.handle(e.WorkerUp(0.2, dead.id, 0))
    scheduler.cluster.activate(scheduler.cluster.workers[dead.id], Reason.SERVICE)
    scheduler.handle(e.EpochStarted(0.3))
    assert scheduler._queueing.promises._request is None
    assert dead not in scheduler.cluster.room.tightest(0)


def test_a_promise_yields_to_a_request_that_lost_its_worker() -> None:
    """Nobody starves: a stream that was cut resumes before a newcomer begins, even into promised room."""
    scheduler = scheduler_with(3, "mell-plus", cluster=ClusterSettings(priorities=Priorities(hole_s=2.0)))
    lay_out(scheduler, {"cut": 999}, {"c": 500}, {"d": 500, "e": 340})
    assert promised(queue(scheduler, "large", 501))
    scheduler.handle(e.WorkerDown(0.1, WorkerId("w0")))
    back = scheduler.handle(e.WorkerUp(0.1, WorkerId("w0"), 1000, 8))
    assert placed(back) == {"cut": "w0"}
