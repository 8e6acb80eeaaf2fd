"""The scheduler sees a change as one whole."""

import pytest

from melld.engine.fleet.notices import Notices
from melld.ids import WorkerId
from melld.scheduler.events import AnyEvent, EpochStarted, WorkerDown

FIRST, SECOND = WorkerDown(1.0, worker=WorkerId("w0")), EpochStarted(2.0)


def test_the_events_of_a_change_are_delivered_at_its_end_in_order() -> None:
    """A request would be placed on a worker that the rest of the change takes away."""
    told: list[AnyEvent] = []
    notices = Notices(told.append)
    with notices.at_once():
        notices.tell(FIRST)
        notices.tell_all([SECOND])
        assert told == []
    assert told == [FIRST, SECOND]


def test_a_failed_change_still_delivers_its_events() -> None:
    """They happened: losing one would leave the scheduler with a wrong view for good."""
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


def test_workers_lost_in_one_change_are_one_loss() -> None:
    """Reported one by one, the first one's requests would be placed on the second."""
    told: list[AnyEvent] = []
    notices = Notices(told.append)
    with notices.at_once():
        notices.tell(SECOND)
        for name in ("w0", "w1", "w2"):
            with notices.at_once():
                notices.tell(WorkerDown(3.0, worker=WorkerId(name)))
        assert told == []
        notices.tell(EpochStarted(4.0))
    assert told == [SECOND, WorkerDown(3.0, WorkerId("w0"), (WorkerId("w1"), WorkerId("w2"))), EpochStarted(4.0)]
