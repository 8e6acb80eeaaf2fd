"""What a worker's steps cost: the fit alone."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.scheduler.steptimes import (
    LEAST_STEPS,
    LEAST_TOKENS,
    REMEMBERED_STEPS,
    StepCosts,
    StepTimes,
    fitted,
    sums_of,
)

COSTS = st.builds(
    StepCosts, base_s=st.floats(1e-3, 0.1), decode_s=st.floats(1e-5, 1e-3), prompt_token_s=st.floats(1e-6, 1e-3)
)
ANY_STEP = st.tuples(st.floats(1e-6, 100.0), st.integers(0, 500), st.integers(0, 32_768))


def learned(costs: StepCosts, chance: random.Random, steps: int, noise: float = 0.03) -> StepTimes:
    """Return what is learned of a worker whose steps take that long, each off by some `noise`."""
    times = StepTimes()
    for _ in range(steps):
        decodes, prompt_tokens = chance.randrange(1, 65), chance.choice((0, 0, chance.randrange(1, 2048)))
        times.stepped(costs.step_s(decodes, prompt_tokens) * chance.gauss(1.0, noise), decodes, prompt_tokens)
    return times


@given(COSTS, st.integers(0, 2**32))
def test_step_costs_are_learned_through_noise(costs: StepCosts, seed: int) -> None:
    """Bad predictions cost slots or late tokens: they are right within a few per cent."""
    found = learned(costs, random.Random(seed), 600).costs
    assert found is not None
    for decodes, prompt_tokens in ((8, 0), (32, 0), (64, 0), (16, 256), (32, 2048)):
        assert found.step_s(decodes, prompt_tokens) == pytest.approx(costs.step_s(decodes, prompt_tokens), rel=0.05)


@given(COSTS, st.integers(0, 2**32))
def test_without_noise_each_cost_is_found(costs: StepCosts, seed: int) -> None:
    """Not only their sum: the daemon subtracts a prompt's share from a step."""
    found = learned(costs, random.Random(seed), 400, noise=0.0).costs
    assert found is not None
    for decodes, prompt_tokens in ((0, 1000), (64, 0)):
        expected = costs.step_s(decodes, prompt_tokens) - costs.base_s
        assert found.step_s(decodes, prompt_tokens) - found.base_s == pytest.approx(expected, rel=0.03, abs=2e-4)


@given(st.lists(ANY_STEP, min_size=LEAST_STEPS, max_size=80))
def test_no_cost_is_negative(steps: list[tuple[float, int, int]]) -> None:
    """Whatever the steps were, more work never looks like less time."""
    times = StepTimes()
    for step in steps:
        times.stepped(*step)
    found = times.costs
    assert found is None or min(found.base_s, found.decode_s, found.prompt_token_s) >= 0.0
    assert (times.prompt_tokens_within(0.05, 8) or LEAST_TOKENS) >= LEAST_TOKENS


@given(st.floats(1e-5, 10.0), st.integers(0, 500), st.integers(0, 8192))
def test_identical_steps_are_predicted(step_s: float, decodes: int, prompt_tokens: int) -> None:
    """One kind of step cannot separate the base from the share; their sum is right all the same."""
    times = StepTimes()
    for _ in range(1000):
        times.stepped(step_s, decodes, prompt_tokens)
    found = times.costs
    assert (found is not None) == bool(decodes or prompt_tokens)
    if found is not None:
        assert found.step_s(decodes, prompt_tokens) == pytest.approx(step_s, rel=0.01)


def test_a_few_steps_give_no_fit() -> None:
    """A process's first steps are slow for reasons of their own."""
    times = StepTimes()
    for _ in range(LEAST_STEPS - 1):
        times.stepped(0.01, 4, 0)
    assert times.costs is None
    assert times.prompt_tokens_within(0.05, 4) is None
    times.stepped(0.01, 4, 0)
    assert times.costs is not None


def test_a_worker_that_becomes_slower_is_noticed() -> None:
    """A device that is shared from now on must not be given yesterday's prompts."""
    chance = random.Random(2)
    times = learned(StepCosts(0.01, 1e-4, 1e-5), chance, 1000)
    for _ in range(800):
        decodes, prompt_tokens = chance.randrange(1, 65), chance.choice((0, 500))
        times.stepped(StepCosts(0.03, 3e-4, 3e-5).step_s(decodes, prompt_tokens), decodes, prompt_tokens)
    found = times.costs
    assert found is not None
    assert found.step_s(32, 500) == pytest.approx(0.03 + 32 * 3e-4 + 500 * 3e-5, rel=0.05)


def test_hours_of_decoding_do_not_erase_a_prompt_s_cost() -> None:
    """Else the next prompt would delay everybody, to be learned anew."""
    costs = StepCosts(0.02, 1e-4, 2e-4)
    times = learned(costs, random.Random(3), 400)
    for _ in range(20_000):
        times.stepped(costs.step_s(8), 8, 0)
    found = times.costs
    assert found is not None
    assert found.prompt_token_s == pytest.approx(costs.prompt_token_s, rel=0.05)


def test_one_step_that_hangs_changes_little() -> None:
    """A pause of the machine is not the cost of a token."""
    times = learned(StepCosts(0.02, 1e-4, 2e-4), random.Random(4), 400)
    times.stepped(30.0, 8, 0)
    assert times.costs is not None
    assert times.costs.step_s(8) == pytest.approx(0.0208, rel=0.05)


def test_prompts_get_the_time_that_the_target_leaves() -> None:
    """Decodes first: (60 - 30 - 10) ms at 0.25 ms a token; never less than a prompt needs to make progress."""
    costs = StepCosts(0.03, 0.001, 0.00025)
    assert costs.prompt_tokens_within(0.06, 10) == pytest.approx(80)
    assert costs.prompt_tokens_within(0.04, 10) == LEAST_TOKENS
    assert costs.prompt_tokens_within(0.01, 10) == LEAST_TOKENS
    assert StepCosts(0.03, 0.001, 0.0).prompt_tokens_within(0.06, 10) == float("inf")


def test_a_fit_is_not_trusted_far_beyond_its_data() -> None:
    """Small prompts are free on a large GPU; thousands of tokens are not: they come by doubling."""
    times = StepTimes()
    for _ in range(100):
        times.stepped(0.01, 4, 0)
    assert times.prompt_tokens_within(0.05, 4) == LEAST_TOKENS
    times.stepped(0.01, 4, 64)
    assert times.prompt_tokens_within(0.05, 4) == 128


ROWS = st.lists(
    st.tuples(st.just(1.0), st.integers(0, 64), st.integers(0, 4096), st.floats(1e-3, 1.0)), min_size=1, max_size=12
)


@given(ROWS)
def test_no_other_non_negative_costs_fit_the_steps_better(
    steps: list[tuple[float, int, int, float]],
) -> None:
    """A cost that is left out is zero, and which one is left out is not a matter of taste."""
    rows = np.array([step[:3] for step in steps]) / np.array([[step[3]] for step in steps])
    found = fitted([sum(column) for column in zip(*(sums_of(step[:3], step[3]) for step in steps), strict=True)])

    def misfit(costs: np.ndarray) -> float:
        return float(((rows @ costs - 1.0) ** 2).sum())

    best = misfit(np.zeros(3))
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            costs = np.zeros(3)
            costs[list(chosen)] = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)[0]
            if costs.min() >= 0.0:
                best = min(best, misfit(costs))
    assert min(found) >= 0.0
    assert misfit(np.array(found)) <= best + 1e-3 * len(steps)


def test_a_step_s_weight_falls_to_a_third_over_the_memory() -> None:
    """Slower forgetting would give a worker yesterday's prompts; faster, the last second's noise."""
    times = StepTimes()
    for _ in range(20 * REMEMBERED_STEPS):
        times.stepped(0.01, 4, 0)
    for _ in range(REMEMBERED_STEPS):
        times.stepped(0.0101, 4, 0)
    assert times.costs is not None
    assert (times.costs.step_s(4) - 0.01) / 0.0001 == pytest.approx(1 - 1 / 2.718, abs=0.03)
