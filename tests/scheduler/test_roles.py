"""The arithmetic of roles, with the measured latencies of the simulator."""

import numpy as np
import pytest

from melld.scheduler.roles import Steps, best_split, least_split, mixed_carries, split_carries
from melld.simulator.catalogue import CARDS, MODELS
from melld.simulator.latency import profile_for

CONTEXT_TOKENS = 1200.0
MACHINES = (("llama-3.1-8b", "rtx-4090"), ("llama-3.1-8b", "h100-80g"), ("llama-2-13b", "a100-40g"))


def steps_of(machine: tuple[str, str], decodes: int) -> Steps:
    latency = profile_for(MODELS[machine[0]], CARDS[machine[1]])

    def steps(workers: int) -> float:
        batch = np.array([decodes / workers])
        return float(latency.step_s(batch, batch * CONTEXT_TOKENS)[0])

    return steps


def gain(machine: tuple[str, str], workers: int, each: int, lone_steps: float) -> float:
    """Return what the best split carries, as a part of what mixed workers do; 0 if none keeps the pace."""
    steps, target_s = steps_of(machine, workers * each), lone_steps * steps_of(machine, 1)(1)
    split = max(split_carries(steps, workers, count, target_s) for count in range(1, workers))
    return split / mixed_carries(steps, workers, target_s)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("each", [2, 8, 16, 24])
def test_a_target_of_three_steps_leaves_mixed_workers_as_much(machine: tuple[str, str], workers: int, each: int):
    assert 0.5 < gain(machine, workers, each, 3.0) < 1.04


@pytest.mark.parametrize("machine", MACHINES)
def test_a_tight_target_and_few_decodes_pay(machine: tuple[str, str]):
    assert 1.5 < gain(machine, 4, 2, 1.5) < 1.8
    assert 1.0 < gain(machine, 4, 2, 2.0) < 1.1


def test_a_tight_target_and_many_decodes_do_not_pay():
    assert gain(("llama-3.1-8b", "rtx-4090"), 4, 8, 1.5) == pytest.approx(1.35, abs=0.02)
    assert gain(("llama-3.1-8b", "rtx-4090"), 4, 16, 1.5) == pytest.approx(0.91, abs=0.02)
    assert gain(("llama-3.1-8b", "rtx-4090"), 4, 24, 1.5) == 0.0
    assert gain(("llama-2-13b", "a100-40g"), 4, 8, 1.5) == pytest.approx(0.95, abs=0.02)


def test_two_workers_gain_only_below_twice_a_step():
    for machine in MACHINES:
        assert all(gain(machine, 2, each, 2.0) < 1.1 for each in (2, 8, 16, 24))


def test_the_fewest_workers_that_carry_the_prompts_are_chosen():
    steps, target_s = steps_of(MACHINES[0], 32), 0.0252
    assert [least_split(steps, 4, target_s, prompts) for prompts in (0.5, 0.7, 1.0, 1.4, 1.5)] == [1, 1, 2, 2, 0]
    assert best_split(steps, 4, target_s) == 2
    assert best_split(steps, 4, 3 * target_s) == 0
    assert least_split(steps, 1, target_s, 0.1) == 0
