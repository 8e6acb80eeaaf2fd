"""A worker's place: its visible state, what the scheduler hears of it, and the requests that wait for it."""

import pytest

from melld.control.status import WorkerState
from melld.engine.fleet.life import State
from melld.engine.fleet.place import Offer, Place, Slot
from melld.engine.wire.spec import WorkerSpec
from melld.ids import WorkerId
from melld.scheduler import events as e

OFFER = Offer(capacity_bytes=1000, slots=4, block_bytes=100)


def place_in(state: State) -> Place:
    spec = WorkerSpec(worker="w0", model_path="", device_kind="cpu")
    place = Place(Slot(worker=WorkerId("w0"), device="cpu:0", spec=spec))
    place.life.state = state
    return place


def test_a_worker_is_announced_once_however_often_it_sleeps() -> None:
    """The scheduler keeps its records of a sleeping worker, and hears only how long waking takes."""
    place = place_in(State.READY)
    place.wake_s = 2.5
    assert place.announce(OFFER, 1.0) == [e.WorkerUp(1.0, "w0", 1000, 4, block_bytes=100)]
    assert place.change(2.0, wake_s=place.wake_s) == [e.WorkerWakeTimeChanged(2.0, "w0", 2.5)]
    assert place.change(3.0, wake_s=place.wake_s) == []
    assert place.announce(OFFER, 4.0) == [e.WorkerWakeTimeChanged(4.0, "w0", 0.0)]


def test_a_worker_that_wakes_with_less_memory_says_so() -> None:
    """Another process may have taken some of the GPU meanwhile."""
    place = place_in(State.READY)
    place.announce(OFFER, 1.0)
    place.change(2.0, wake_s=place.wake_s)
    assert place.announce(Offer(capacity_bytes=700, slots=3, block_bytes=100), 3.0) == [
        e.WorkerCapacityChanged(3.0, "w0", 700),
        e.WorkerSlotsChanged(3.0, "w0", 3),
        e.WorkerWakeTimeChanged(3.0, "w0", 0.0),
    ]


def test_requests_wait_in_order_until_the_worker_is_ready() -> None:
    """First come, first served, even through a wake."""
    place = place_in(State.STARTING)
    place.held += ["r1", "r2"]
    assert place.take_held() == ["r1", "r2"]
    assert place.take_held() == []


def test_a_worker_that_fails_to_wake_is_withdrawn_with_its_requests() -> None:
    """They are placed elsewhere, once."""
    place = place_in(State.STARTING)
    place.announce(OFFER, 1.0)
    place.change(2.0, wake_s=place.wake_s)
    place.held.append("r1")
    assert place.leave(3.0) == [e.WorkerDown(3.0, "w0")]
    assert place.take_held() == []
    assert place.leave(4.0) == []
    assert place.announce(OFFER, 5.0) == [e.WorkerUp(5.0, "w0", 1000, 4, block_bytes=100)]


def test_the_slot_limit_is_reported_only_when_it_changes() -> None:
    """Once, not at every step."""
    place = place_in(State.READY)
    assert place.change(0.0, slots=2) == []
    place.announce(OFFER, 1.0)
    assert place.change(2.0, slots=4) == []
    assert place.change(3.0, slots=2) == [e.WorkerSlotsChanged(3.0, "w0", 2)]
    assert place.change(4.0, slots=2) == []


def test_a_new_place_has_no_history() -> None:
    """A worker that never died has no back-off, and the scheduler does not know it before its first token."""
    place = Place(place_in(State.READY).slot)
    assert (place.state, place.process, place.offer, place.held) == (WorkerState.STOPPED, None, None, [])
    assert (place.life.restarts, place.life.failed_starts, place.life.setbacks, place.wake_s) == (0, 0, 0, 0.0)
    assert (
        place.change(0.0, slots=1)
        == place.change(0.0, capacity_bytes=1)
        == place.change(0.0, wake_s=place.wake_s)
        == place.leave(0.0)
        == []
    )


@pytest.mark.parametrize("state", [*State])
def test_a_state_is_shown_by_what_it_means_to_others(state: State) -> None:
    """One word says whether a start is awaited, and whether a dead worker waits for somebody else."""
    place = place_in(state)
    assert place.state == state
    place.offer = OFFER
    assert place.state == (WorkerState.WAKING if state is State.STARTING else state)
    place.life.obstacle = "another program fills its device"
    assert (place.state is WorkerState.WAITING) == (state is State.FAILED)


def test_capacity_is_reported_when_it_changes() -> None:
    """A neighbour's memory on the device counts at once, and once."""
    place = place_in(State.READY)
    place.announce(OFFER, 1.0)
    assert place.change(2.0, capacity_bytes=1000) == []
    assert place.change(3.0, capacity_bytes=900) == [e.WorkerCapacityChanged(3.0, "w0", 900)]
    assert place.change(4.0, capacity_bytes=900) == []
    assert place.offer == Offer(capacity_bytes=900, slots=4, block_bytes=100)


def test_a_later_offer_replaces_the_first_and_states_trust() -> None:
    """What a restarted process offers counts, and not its predecessor's offer."""
    place = place_in(State.READY)
    shaky = Offer(capacity_bytes=1000, slots=4, block_bytes=100, steady=False)
    assert place.announce(shaky, 1.0) == [e.WorkerUp(1.0, "w0", 1000, 4, block_bytes=100, steady=False)]
    assert place.announce(OFFER, 2.0) == []
    assert place.offer == OFFER


def test_a_worker_that_left_while_cold_is_warm_on_return() -> None:
    """Else the scheduler would never hear again that it must wake."""
    place = place_in(State.STARTING)
    place.announce(OFFER, 1.0)
    place.change(2.0, wake_s=place.wake_s)
    place.leave(3.0)
    assert place.offer is None
    place.announce(OFFER, 4.0)
    assert place.change(5.0, wake_s=place.wake_s) == [e.WorkerWakeTimeChanged(5.0, "w0", 0.0)]
