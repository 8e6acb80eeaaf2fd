"""A worker's life cycle: the table, its drawing, who may stop it, and when a dead one is restarted."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.engine.fleet.life import (
    FACTS,
    MAX_FAILED_STARTS,
    TRANSITIONS,
    WARM,
    Do,
    Event,
    Guard,
    Intent,
    State,
    Who,
    WorkerLife,
)
from melld.errors import IllegalTransition
from melld.ids import WorkerId

DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"


def life_in(state: State) -> WorkerLife:
    life = WorkerLife(WorkerId("w0"))
    life.state = state
    return life


def lived(*happened: Event, state: State = State.STOPPED) -> list[str]:
    """Return the states that a worker goes through."""
    life, seen = life_in(state), []
    for event in happened:
        life.take(event)
        seen.append(str(life.state))
    return seen


def test_a_worker_goes_to_sleep_and_comes_back() -> None:
    """The whole round, step by step."""
    happened = (Event.WAKE, Event.IS_READY, Event.SLEEP, Event.WAKE, Event.STOP, Event.ENDED, Event.WAKE)
    assert lived(*happened) == ["starting", "ready", "asleep", "ready", "stopping", "stopped", "starting"]


def test_a_worker_dozes_and_wakes_in_the_same_process() -> None:
    """Waking is not a start, and is not counted as one."""
    happened = (Event.DOZE, Event.HAS_DOZED, Event.WAKE, Event.IS_READY)
    assert lived(*happened, state=State.READY) == ["stopping", "dozing", "starting", "ready"]


def test_an_arrival_revives_a_stopping_worker() -> None:
    """It is wanted again before it is gone: the old process ends, and a new one starts in the same step."""
    life = life_in(State.STOPPING)
    assert [life.take(event) for event in (Event.WAKE, Event.ENDED)] == [Do.BEGIN, Do.BEGIN]
    assert life.state is State.STARTING


@pytest.mark.parametrize("state", [*State])
@pytest.mark.parametrize("event", [*Event])
def test_an_event_without_a_transition_changes_nothing(state: State, event: Event) -> None:
    """An impossible event is a bug that shows at once; a late request is none."""
    life = life_in(state)
    if (state, event) in TRANSITIONS:
        return
    if event in FACTS:
        with pytest.raises(IllegalTransition):
            life.take(event)
    else:
        assert life.take(event) is Do.NOTHING
    assert life.state is state


def test_any_worker_with_a_process_may_die() -> None:
    """No action of the kernel is a surprise; one without a process may lose its machine."""
    assert {state for state, event in TRANSITIONS if event is Event.DIED} == {*State} - {State.FAILED}


def test_only_an_operator_restarts_a_worker_that_was_given_up() -> None:
    """Five failed starts end the retries, and an operator's start begins them again."""
    life = life_in(State.FAILED)
    assert (life.may(Event.RETRY), life.may(Event.WAKE)) == (True, False)
    life.failed_starts = MAX_FAILED_STARTS
    assert (life.given_up, life.may(Event.RETRY), life.may(Event.WAKE)) == (True, False, True)
    assert life.take(Event.WAKE) is Do.BEGIN
    assert (life.given_up, life.failed_starts) == (False, 0)


@pytest.mark.parametrize("state", [State.STOPPED, State.STOPPING, State.DOZING, State.FAILED])
@pytest.mark.parametrize("kept", [*Who, "obstacle"])
def test_a_worker_that_is_kept_out_cannot_be_started(state: State, kept: Who | str) -> None:
    """The guard is in the table: no caller has to remember it."""
    life = life_in(state)
    event = Event.RETRY if state is State.FAILED else Event.WAKE
    assert life.may(event)
    if isinstance(kept, Who):
        life.wish(kept, Intent.OUT)
    else:
        life.obstacle = "another program fills its device"
    assert life.take(event) is Do.NOTHING
    assert life.state is state


def test_the_strictest_intent_wins() -> None:
    """An operator's resume does not undo the Landlord's emptying, nor the other way round."""
    life = life_in(State.READY)
    life.wish(Who.LANDLORD, Intent.DRAINING)
    life.wish(Who.OPERATOR, Intent.OUT)
    assert life.intent is Intent.OUT
    life.wish(Who.OPERATOR, Intent.IN_SERVICE)
    assert (life.intent, life.wished_by(Who.LANDLORD)) == (Intent.DRAINING, Intent.DRAINING)


def test_each_death_doubles_the_back_off_up_to_a_minute() -> None:
    """A worker that crashes at once must not keep the machine busy with restarts; forgiveness resets it."""
    life, waited_s = life_in(State.READY), []
    for _ in range(9):
        life.state = State.READY
        life.take(Event.DIED)
        waited_s.append(life.back_off_s)
        assert (life.state, life.failed_starts, life.given_up) == (State.FAILED, 0, False)
    assert waited_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    life.forgive()
    assert (life.back_off_s, life.setbacks) == (1.0, 0)


def test_a_worker_that_dies_for_days_is_retried_every_minute() -> None:
    """Two thousand deaths must not overflow the next back-off."""
    life = life_in(State.READY)
    life.setbacks = 2000
    life.take(Event.DIED)
    assert life.back_off_s == 60.0


def test_only_consecutive_deaths_while_loading_give_a_worker_up() -> None:
    """One good start shows that the model loads: a later death may be transient."""
    life = life_in(State.STARTING)
    for state in [State.STARTING] * (MAX_FAILED_STARTS - 1) + [State.READY] + [State.STARTING] * MAX_FAILED_STARTS:
        assert not life.given_up
        life.state = state
        life.take(Event.DIED)
    assert life.given_up
    assert life.setbacks == 2 * MAX_FAILED_STARTS


@given(st.lists(st.sampled_from([*Event])))
def test_a_process_exists_exactly_when_the_state_says_so(happened: list[Event]) -> None:
    """The table's actions leave one where the worker serves, and none where it has stopped."""
    life, processes = life_in(State.STOPPED), 0
    for event in happened:
        try:
            do = life.take(event)
        except IllegalTransition:
            continue
        if event in (Event.ENDED, Event.DIED):
            processes = 0
        processes = 1 if do is Do.BEGIN else processes
        if life.state in WARM | {State.STARTING, State.STOPPING, State.DOZING}:
            assert processes == 1
        else:
            assert processes == 0


def drawing() -> str:
    """Return the table as a diagram."""
    rows = [
        f"    {state} --> {step.after}: {event}" + (f" [{step.guard}]" if step.guard is not Guard.NONE else "")
        for (state, event), step in TRANSITIONS.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *rows, "```"])


def test_the_documented_drawing_matches_the_table() -> None:
    """The document never shows a transition that does not exist."""
    assert drawing() in DOCUMENT.read_text(), f"put this into {DOCUMENT.name}:\n{drawing()}"
