"""The lifecycle of a worker as the daemon sees it: the table alone."""

import pytest

from melld.control.status import WorkerState
from melld.engine.fleet.place import MAX_FAILED_STARTS, PLACE_TRANSITIONS, Place, Slot
from melld.engine.wire.messages import WorkerSpec
from melld.errors import IllegalTransition

EVENTS = sorted({event for _, event in PLACE_TRANSITIONS})


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
        if (state, event) not in PLACE_TRANSITIONS:
            with pytest.raises(IllegalTransition):
                place.step(event)
            assert place.state is state


def test_a_process_may_die_in_every_state_that_has_one() -> None:
    """Nothing that the kernel does is a surprise."""
    with_process = {WorkerState.STARTING, WorkerState.READY, WorkerState.ASLEEP, WorkerState.WAKING}
    assert {state for state, event in PLACE_TRANSITIONS if event == "died"} == with_process


def test_a_place_is_given_up_only_while_it_has_failed() -> None:
    """Five failed starts end the trying, and an operator's start begins it again."""
    place = place_in(WorkerState.FAILED)
    place.failed_starts = MAX_FAILED_STARTS
    assert place.given_up
    place.step("start")
    assert not place.given_up
