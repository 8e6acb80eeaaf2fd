"""The records of workers and requests: initial values, sums and legal transitions."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.errors import IllegalTransition
from melld.ids import RequestId, WorkerId
from melld.scheduler.state import (
    REQUEST_TRANSITIONS,
    WORKER_TRANSITIONS,
    Duty,
    Request,
    RequestState,
    Worker,
)

BYTES = st.integers(0, 10**12)


def worker() -> Worker:
    return Worker(WorkerId("w0"), capacity_bytes=1000, slots=4, machine=2, rank=7)


def request() -> Request:
    return Request(RequestId("r0"), kv_bytes=100, priority=1, sequence=5)


def test_a_new_worker_is_asleep_empty_warm_and_trusted() -> None:
    """A wrong initial value would count as memory or as requests for as long as the worker lives."""
    new = worker()
    assert (new.id, new.machine, new.rank, new.order) == ("w0", 2, 7, -1)
    assert (new.state, new.steady, new.slots, new.offered_slots) == (Duty.ASLEEP, True, 4, 4)
    assert (new.capacity_bytes, new.largest_capacity_bytes) == (1000, 1000)
    assert (new.free_bytes, new.settled_free_bytes, new.held_bytes) == (1000, 1000, 0)
    assert (new.requests, new.arriving, new.count, new.leaving, new.leaving_bytes) == ({}, {}, 0, 0, 0)
    assert (new.used_bytes, new.shared_bytes) == (0, 0)
    assert (new.growing, new.grown_bytes, new.growth_bytes_s) == (0, 0, 0.0)
    assert (new.wake_s, new.ready_s, new.empty_since_s) == (0.0, 0.0, 0.0)


def test_a_new_request_waits_for_any_worker() -> None:
    """It belongs to none, may be moved once it runs, and has what it was admitted with."""
    new = request()
    assert (new.id, new.kv_bytes, new.priority, new.sequence) == ("r0", 100, 1, 5)
    assert (new.state, new.worker, new.destination, new.pinned) == (RequestState.WAITING, None, None, False)
    assert (new.arrived_s, new.placed_s, new.moved_s) == (0.0, float("-inf"), 0.0)
    assert (new.client, new.prompt_tokens, dict(new.cached_tokens)) == ("", 0, {})
    told = Request(RequestId("r1"), 1, 0, 6, 2.5, "key", 30, {WorkerId("w0"): 20})
    assert (told.arrived_s, told.client, told.prompt_tokens, told.cached_tokens) == (2.5, "key", 30, {"w0": 20})


@given(capacity=BYTES, used=BYTES, shared=BYTES, leaving=BYTES, size=BYTES)
def test_free_held_and_freed_bytes_follow_from_the_sums(
    capacity: int, used: int, shared: int, leaving: int, size: int
) -> None:
    """A leaving request frees only what no other may hold, and an overfilled worker owes what it lacks."""
    one = worker()
    one.capacity_bytes, one.used_bytes, one.shared_bytes, one.leaving_bytes = capacity, used, shared, leaving
    assert one.free_bytes + used == capacity
    assert one.settled_free_bytes - leaving == one.free_bytes
    assert one.held_bytes - shared == used
    assert one.frees_bytes(size) + min(size, shared) == size


@pytest.mark.parametrize(("state", "pinned"), list(product(RequestState, (False, True))))
def test_only_unpinned_running_requests_may_be_moved(state: RequestState, pinned: bool) -> None:
    """A policy never overrides an operator, nor moves a request that is already moving."""
    one = request()
    one.state, one.pinned = state, pinned
    assert one.is_movable == (state is RequestState.RUNNING and not pinned)


def test_a_transition_that_the_table_lacks_raises_with_details() -> None:
    """A bug shows where it happens, with the names that a developer needs, and changes nothing."""
    one, other = worker(), request()
    for duty, event in product(Duty, {event for _, event in WORKER_TRANSITIONS}):
        one.state = duty
        if (duty, event) in WORKER_TRANSITIONS:
            assert one.after(event) is WORKER_TRANSITIONS[duty, event]
        else:
            with pytest.raises(IllegalTransition, match=f"worker.*w0.*{duty}.*{event}|worker.*w0.*{event}.*{duty}"):
                one.after(event)
        assert one.state is duty
    for state, event in product(RequestState, {event for _, event in REQUEST_TRANSITIONS}):
        other.state = state
        if (state, event) in REQUEST_TRANSITIONS:
            assert other.after(event) is REQUEST_TRANSITIONS[state, event]
        else:
            with pytest.raises(IllegalTransition, match=f"request.*r0.*{state}.*{event}|request.*r0.*{event}.*{state}"):
                other.after(event)
        assert other.state is state
