"""A worker's life: the table, its drawing, what the scheduler hears of it, and the requests that wait for it."""

from pathlib import Path

import pytest

from melld.control.status import WorkerState
from melld.engine.fleet.place import MAX_FAILED_STARTS, TRANSITIONS, Offer, Place, Slot
from melld.engine.wire.spec import WorkerSpec
from melld.errors import IllegalTransition
from melld.scheduler import events as e

DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"
OFFER = Offer(capacity_bytes=1000, slots=4, block_bytes=100)
EVENTS = sorted({event for _, event in TRANSITIONS})


def place_in(state: WorkerState) -> Place:
    place = Place(Slot(worker="w0", device="cpu:0", spec=WorkerSpec(worker="w0", model_path="", device_kind="cpu")))
    place.state = state
    return place


def test_a_worker_goes_to_rest_and_comes_back() -> None:
    """The whole round, step by step."""
    place = place_in(WorkerState.STARTING)
    seen = []
    for event in ("ready", "sleep", "wake", "sleep", "stop", "ended", "start", "ready"):
        place.step(event)
        seen.append(str(place.state))
    assert seen == ["ready", "asleep", "ready", "asleep", "stopping", "stopped", "waking", "ready"]


def test_a_worker_dozes_and_wakes_without_another_process() -> None:
    """What it does while it waits is no start, and nobody counts it as one."""
    place = place_in(WorkerState.READY)
    seen = []
    for event in ("doze", "wake", "ready", "sleep", "doze", "stop"):
        place.step(event)
        seen.append(str(place.state))
    assert seen == ["dozing", "waking", "ready", "asleep", "dozing", "stopping"]


def test_an_arrival_turns_a_worker_round_that_is_ending() -> None:
    """It is wanted again before it is gone: the old process ends, and a new one is started in the same breath."""
    place = place_in(WorkerState.STOPPING)
    for event in ("start", "ended", "ready"):
        place.step(event)
    assert place.state is WorkerState.READY


@pytest.mark.parametrize("state", [*WorkerState])
def test_what_the_table_does_not_have_changes_nothing(state: WorkerState) -> None:
    """An impossible step is a bug that is seen at once, not a worker in two minds."""
    for event in EVENTS:
        place = place_in(state)
        if (state, event) not in TRANSITIONS:
            with pytest.raises(IllegalTransition):
                place.step(event)
            assert place.state is state


def test_a_process_may_die_in_every_state_that_has_one() -> None:
    """Nothing that the kernel does is a surprise; one without a process may lose its machine."""
    with_process = {*WorkerState} - {
        WorkerState.DRAINING,
        WorkerState.DRAINED,
        WorkerState.LENT,
        WorkerState.WAITING,
        WorkerState.STOPPING,
        WorkerState.FAILED,
    }
    assert {state for state, event in TRANSITIONS if event == "died"} == with_process


def test_a_place_is_given_up_only_while_it_has_failed() -> None:
    """Five failed starts end the trying, and an operator's start begins it again."""
    place = place_in(WorkerState.FAILED)
    place.failed_starts = MAX_FAILED_STARTS
    assert place.given_up
    place.step("start")
    assert not place.given_up


def test_an_operator_starts_what_was_given_up_and_nobody_wakes_what_he_keeps_out() -> None:
    """Guards stand in the table: no caller has to remember them."""
    place = place_in(WorkerState.FAILED)
    assert (place.may("retry"), place.may("start")) == (True, False)
    place.failed_starts = MAX_FAILED_STARTS
    assert (place.may("retry"), place.may("start")) == (False, True)
    for state in (WorkerState.STOPPED, WorkerState.STOPPING):
        place = place_in(state)
        place.stays_out = True
        assert (place.may("wake"), place.may("start")) == (False, True)
        with pytest.raises(IllegalTransition):
            place.step("wake")


def drawing() -> str:
    """The table as a diagram."""
    rows = [
        f"    {state} --> {step.after}: {event}" + (f" [{step.guard}]" if step.guard else "")
        for (state, event), step in TRANSITIONS.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *rows, "```"])


def test_the_drawing_in_the_documents_is_the_table() -> None:
    """A reader of the document never learns of a step that there is not."""
    assert drawing() in DOCUMENT.read_text(), f"put this into {DOCUMENT.name}:\n{drawing()}"


def test_a_worker_is_announced_once_however_often_it_stops_and_wakes() -> None:
    """The scheduler keeps what it knows of a worker that sleeps, and hears only how long it takes to wake."""
    place = place_in(WorkerState.READY)
    place.wake_s = 2.5
    assert place.announce(OFFER, 1.0) == [e.WorkerUp(1.0, "w0", 1000, 4, block_bytes=100)]
    assert place.rest(2.0) == [e.WorkerWakeTimeChanged(2.0, "w0", 2.5)]
    assert place.rest(3.0) == []
    assert place.announce(OFFER, 4.0) == [e.WorkerWakeTimeChanged(4.0, "w0", 0.0)]


def test_a_worker_that_wakes_with_less_memory_says_so() -> None:
    """Another process may have taken some of the GPU meanwhile."""
    place = place_in(WorkerState.READY)
    place.announce(OFFER, 1.0)
    place.rest(2.0)
    assert place.announce(Offer(capacity_bytes=700, slots=3, block_bytes=100), 3.0) == [
        e.WorkerCapacityChanged(3.0, "w0", 700),
        e.WorkerSlotsChanged(3.0, "w0", 3),
        e.WorkerWakeTimeChanged(3.0, "w0", 0.0),
    ]


def test_requests_are_held_in_their_order_until_the_worker_is_there() -> None:
    """First come, first served, also through a wake."""
    place = place_in(WorkerState.WAKING)
    place.held += ["r1", "r2"]
    assert place.take_held() == ["r1", "r2"]
    assert place.take_held() == []


def test_a_worker_that_does_not_wake_is_taken_from_the_scheduler_with_what_it_held() -> None:
    """Its requests are placed anew, elsewhere, and are nobody's twice."""
    place = place_in(WorkerState.WAKING)
    place.announce(OFFER, 1.0)
    place.rest(2.0)
    place.held.append("r1")
    assert place.leave(3.0) == [e.WorkerDown(3.0, "w0")]
    assert place.take_held() == []
    assert place.leave(4.0) == []
    assert place.announce(OFFER, 5.0) == [e.WorkerUp(5.0, "w0", 1000, 4, block_bytes=100)]


def test_a_limit_of_slots_is_told_when_it_changes() -> None:
    """The scheduler hears of a slow worker once, not at every step."""
    place = place_in(WorkerState.READY)
    assert place.limit(2, 0.0) == []
    place.announce(OFFER, 1.0)
    assert place.limit(4, 2.0) == []
    assert place.limit(2, 3.0) == [e.WorkerSlotsChanged(3.0, "w0", 2)]
    assert place.limit(2, 4.0) == []


def test_a_new_place_has_nothing_behind_it() -> None:
    """A worker that never died waits for nothing, and the scheduler does not know it before its first token."""
    place = Place(place_in(WorkerState.READY).slot)
    assert (place.state, place.process, place.offer, place.held) == (WorkerState.STARTING, None, None, [])
    assert (place.restarts, place.failed_starts, place.setbacks, place.unanswered) == (0, 0, 0, 0)
    assert (place.has_been_ready, place.stays_out, place.is_cold, place.detail) == (False, False, False, "")
    assert (place.wake_s, place.back_off_s, place.given_up) == (0.0, 1.0, False)
    assert place.limit(1, 0.0) == place.resize(1, 0.0) == place.rest(0.0) == place.leave(0.0) == []


def test_each_death_doubles_the_wait_up_to_a_minute_and_forgiving_ends_it() -> None:
    """A worker that crashes at once must not keep the machine busy with its starts."""
    place, waited_s = place_in(WorkerState.READY), []
    for _ in range(9):
        place.state = WorkerState.READY
        place.died(was_ready=True)
        waited_s.append(place.back_off_s)
        assert (place.state, place.failed_starts, place.given_up) == (WorkerState.FAILED, 0, False)
    assert waited_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    place.forgive()
    assert (place.back_off_s, place.setbacks) == (1.0, 0)


def test_a_worker_that_dies_for_days_is_still_started_once_a_minute() -> None:
    """Two thousand deaths are no number too large to work out the next rest from."""
    place = place_in(WorkerState.STARTING)
    place.setbacks = 2000
    place.died(was_ready=True)
    assert place.back_off_s == 60.0


def test_only_deaths_while_loading_in_a_row_give_a_worker_up() -> None:
    """One good start shows that the model loads: what killed it later may pass."""
    place = place_in(WorkerState.STARTING)
    for was_ready in [False] * (MAX_FAILED_STARTS - 1) + [True] + [False] * MAX_FAILED_STARTS:
        assert not place.given_up
        place.state = WorkerState.STARTING
        place.died(was_ready)
    assert place.given_up
    assert place.setbacks == 2 * MAX_FAILED_STARTS
    place.forgive()
    assert not place.given_up


def test_capacity_is_told_when_it_changes() -> None:
    """A neighbour's memory on the device counts at once, and once."""
    place = place_in(WorkerState.READY)
    place.announce(OFFER, 1.0)
    assert place.resize(1000, 2.0) == []
    assert place.resize(900, 3.0) == [e.WorkerCapacityChanged(3.0, "w0", 900)]
    assert place.resize(900, 4.0) == []
    assert place.offer == Offer(capacity_bytes=900, slots=4, block_bytes=100)


def test_a_later_offer_replaces_the_first_and_says_whether_the_worker_is_trusted() -> None:
    """What a restarted process offers counts, and not what its predecessor did."""
    place = place_in(WorkerState.READY)
    shaky = Offer(capacity_bytes=1000, slots=4, block_bytes=100, steady=False)
    assert place.announce(shaky, 1.0) == [e.WorkerUp(1.0, "w0", 1000, 4, block_bytes=100, steady=False)]
    assert place.announce(OFFER, 2.0) == []
    assert place.offer == OFFER


def test_a_worker_that_left_while_it_was_cold_is_warm_when_it_is_back() -> None:
    """Else the scheduler would never hear again that it must wake."""
    place = place_in(WorkerState.WAKING)
    place.announce(OFFER, 1.0)
    place.rest(2.0)
    place.leave(3.0)
    assert (place.is_cold, place.offer) == (False, None)
    place.announce(OFFER, 4.0)
    assert place.rest(5.0) == [e.WorkerWakeTimeChanged(5.0, "w0", 0.0)]
