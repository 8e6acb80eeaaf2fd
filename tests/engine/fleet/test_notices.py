"""The scheduler hears of a change as a whole."""

import pytest

from melld.engine.fleet.notices import Notices
from melld.ids import WorkerId
from melld.scheduler.events import AnyEvent, WorkerDown

FIRST, SECOND = WorkerDown(1.0, worker=WorkerId("w0")), WorkerDown(2.0, worker=WorkerId("w1"))


def test_the_events_of_a_change_are_told_at_its_end_in_their_order() -> None:
    """A request would be placed on a worker that the rest of the change takes away."""
    told: list[AnyEvent] = []
    notices = Notices(told.append)
    with notices.at_once():
        notices.tell(FIRST)
        notices.tell_all([SECOND])
        assert told == []
    assert told == [FIRST, SECOND]


def test_a_change_that_fails_keeps_back_nothing() -> None:
    """What has happened has happened: an event that were lost would leave the scheduler with another world for good."""
    told: list[AnyEvent] = []
    notices = Notices(told.append)

    def change() -> None:
        with notices.at_once():
            notices.tell(FIRST)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change()
    notices.tell(SECOND)
    assert told == [FIRST, SECOND]
