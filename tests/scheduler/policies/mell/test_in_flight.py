"""A moving request counts on two workers, so what happens to it changes the room on both."""

from melld.scheduler import events as e
from tests.scheduler.driving import arrive, finish, moved, placed, scheduler_with


def test_the_end_of_a_moving_request_frees_room_at_its_source() -> None:
    """No request waits beside room: a worker's room is known again once the leaving request has ended."""
    scheduler = scheduler_with(workers=2, policy="mell-unbatched")
    arrive(scheduler, "group", 1)
    arrive(scheduler, "s", 251)
    assert moved(arrive(scheduler, "l", 501)) == {"s": "w0"}
    assert placed(arrive(scheduler, "t", 248)) == {"t": "w1"}
    scheduler.handle(e.WorkerDraining(0.0, "w0"))
    assert placed(arrive(scheduler, "waiting", 501)) == {}
    assert placed(finish(scheduler, "s")) == {"waiting": "w1"}
