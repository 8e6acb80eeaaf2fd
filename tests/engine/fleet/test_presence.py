"""What the scheduler is told of workers that stop and wake, and the requests that wait for them."""

from melld.engine.fleet.presence import Offer, Presence
from melld.scheduler import events as e

OFFER = Offer(capacity_bytes=1000, slots=4, block_bytes=100)


def test_a_worker_is_announced_once_however_often_it_stops_and_wakes() -> None:
    """The scheduler keeps what it knows of a worker that sleeps, and hears only how long it takes to wake."""
    presence = Presence()
    assert list(presence.ready("w0", OFFER, 1.0)) == [e.WorkerUp(1.0, "w0", 1000, 4, block_bytes=100)]
    assert list(presence.stopped("w0", 2.5, 2.0)) == [e.WorkerWakeTimeChanged(2.0, "w0", 2.5)]
    assert list(presence.stopped("w0", 2.5, 3.0)) == []
    assert list(presence.ready("w0", OFFER, 4.0)) == [e.WorkerWakeTimeChanged(4.0, "w0", 0.0)]


def test_a_worker_that_wakes_with_less_memory_says_so() -> None:
    """Another process may have taken some of the GPU meanwhile."""
    presence = Presence()
    list(presence.ready("w0", OFFER, 1.0))
    list(presence.stopped("w0", 2.5, 2.0))
    told = list(presence.ready("w0", Offer(capacity_bytes=700, slots=3, block_bytes=100), 3.0))
    assert told == [
        e.WorkerCapacityChanged(3.0, "w0", 700),
        e.WorkerSlotsChanged(3.0, "w0", 3),
        e.WorkerWakeTimeChanged(3.0, "w0", 0.0),
    ]


def test_requests_are_held_in_their_order_until_the_worker_is_there() -> None:
    """First come, first served, also through a wake."""
    presence = Presence()
    for request in ("r1", "r2"):
        presence.hold(request, "w0")
    presence.hold("r3", "w1")
    assert presence.holds("r2", "w0")
    assert not presence.holds("r2", "w1")
    assert presence.release("w0") == ["r1", "r2"]
    assert presence.release("w0") == []


def test_a_worker_that_does_not_wake_is_taken_from_the_scheduler_with_what_it_held() -> None:
    """Its requests are placed anew, elsewhere, and are nobody's twice."""
    presence = Presence()
    list(presence.ready("w0", OFFER, 1.0))
    list(presence.stopped("w0", 2.5, 2.0))
    presence.hold("r1", "w0")
    assert list(presence.lost("w0", 3.0)) == [e.WorkerDown(3.0, "w0")]
    assert presence.release("w0") == []
    assert list(presence.lost("w0", 4.0)) == []
    assert list(presence.ready("w0", OFFER, 5.0)) == [e.WorkerUp(5.0, "w0", 1000, 4, block_bytes=100)]


def test_a_limit_of_slots_is_told_when_it_changes() -> None:
    """The scheduler hears of a slow worker once, not at every step."""
    presence = Presence()
    assert list(presence.limit("w0", 2, 0.0)) == []
    list(presence.ready("w0", OFFER, 1.0))
    assert list(presence.limit("w0", 4, 2.0)) == []
    assert list(presence.limit("w0", 2, 3.0)) == [e.WorkerSlotsChanged(3.0, "w0", 2)]
    assert list(presence.limit("w0", 2, 4.0)) == []
