"""The slot limit of a slow worker: the rule alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.engine.fleet.paces import ROOM, STEPS, Pace


def run(pace: Pace, seconds_per_request: float, offered: int, steps: int) -> int:
    """Return the limit after that many steps of a worker that runs as many offered requests as allowed."""
    for _ in range(steps):
        running = min(offered, pace.slots)
        pace.stepped(seconds_per_request * running, running)
    return pace.slots


def test_a_fast_worker_is_not_limited() -> None:
    """Without a reason nothing changes."""
    assert run(Pace(0.1, 64), 0.001, 50, 1000) == 64


def test_a_slow_worker_gets_no_more_than_it_can_do_in_time() -> None:
    """A hundred milliseconds at ten a request: ten requests, and not one more."""
    assert 5 <= run(Pace(0.1, 64), 0.01, 64, 20 * STEPS) <= 10


def test_the_limit_is_lifted_when_steps_are_fast_again() -> None:
    """A temporary load does not halve a worker permanently."""
    pace = Pace(0.1, 64)
    run(pace, 0.01, 64, 20 * STEPS)
    assert run(pace, 0.0001, 64, 100 * STEPS) == 64


def test_one_slow_step_changes_nothing() -> None:
    """A long prefill is not a slow worker."""
    pace = Pace(0.1, 64)
    for _ in range(STEPS):
        pace.stepped(0.01, 8)
    assert pace.stepped(20.0, 8) == 64


@given(
    target_s=st.floats(0.001, 1.0),
    most=st.integers(1, 300),
    steps=st.lists(st.tuples(st.floats(1e-5, 10.0), st.integers(0, 300)), max_size=300),
)
def test_the_limit_is_between_one_and_vllm_s(target_s: float, most: int, steps: list[tuple[float, int]]) -> None:
    """At zero requests would wait indefinitely."""
    pace = Pace(target_s, most)
    for step_s, running in steps:
        assert 1 <= pace.stepped(step_s, min(running, most)) <= most


TARGET_S = 0.1


@pytest.mark.parametrize(
    ("limit", "step_s", "running", "then"),
    [
        (64, 2 * TARGET_S, 8, 4),  # twice as slow: half as many
        (64, 1.01 * TARGET_S, 8, 7),  # a little too slow: one fewer than run
        (64, 100 * TARGET_S, 8, 1),  # never none
        (64, 100 * TARGET_S, 2, 1),
        (64, 100 * TARGET_S, 1, 64),  # a lone request has no neighbours to blame
        (64, TARGET_S, 8, 64),  # in time is in time
        (8, 0.5 * TARGET_S, 8, 10),  # with room, and all places taken: a fourth more
        (9, 0.5 * TARGET_S, 9, 11),
        (2, 0.5 * TARGET_S, 2, 3),  # at least one
        (62, 0.5 * TARGET_S, 62, 64),  # never more than vLLM's
        (8, ROOM * TARGET_S, 8, 8),
        (8, ROOM * TARGET_S, 3, 8),
        (8, 0.5 * TARGET_S, 7, 8),  # nobody asks for more
        (8, 0.5 * TARGET_S, 3, 9),  # so few that it says little: one more
        (8, 0.5 * TARGET_S, 4, 8),
        (64, 0.5 * TARGET_S, 3, 64),
    ],
)
def test_the_limit_follows_the_median_of_recent_steps(limit: int, step_s: float, running: int, then: int) -> None:
    """Only of those under the current limit: a change is judged by what came after it."""
    pace = Pace(TARGET_S, 64)
    pace.slots = limit
    for _ in range(STEPS - 1):
        assert pace.stepped(step_s, running) == limit
    assert pace.stepped(step_s, running) == then
    if then != limit:
        assert pace.stepped(step_s, running) == then  # the count begins anew
