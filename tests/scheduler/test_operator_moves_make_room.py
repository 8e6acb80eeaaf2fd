"""Room freed by an operator's move goes to waiting requests."""

from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from tests.scheduler.driving import arrive, moved, placed, scheduler_with


def test_room_that_an_operator_makes_is_used_at_once() -> None:
    """No request waits beside room: with instant moves no later event reports that the source is free."""
    scheduler = scheduler_with(workers=2, cluster=ClusterSettings(instant_moves=True))
    for name, kv_bytes in (("a", 400), ("b", 500), ("c", 300), ("d", 250), ("waiting", 500)):
        commands = arrive(scheduler, name, kv_bytes)
    assert placed(commands) == {}
    asked = scheduler.handle(e.MoveAsked(0.0, "a", "w1"))
    assert moved(asked) == {"a": "w1"}
    assert placed(asked) == {"waiting": "w0"}
