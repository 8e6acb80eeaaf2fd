"""The arithmetic of roles, with the measured latencies of the simulator."""

import numpy as np
import pytest

from melld.scheduler.roles import PREFILL_PART, Steps, best_split, pace_s, pressure
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


def carries(steps: Steps, workers: int, prefilling: int, target_s: float) -> float:
    """Return the seconds of prompts per second at which the pace equals the target; 0 if decodes alone exceed it."""
    decoding = workers - prefilling
    left = 1.0 - steps(decoding) / target_s
    return PREFILL_PART * prefilling + decoding * left if left >= 0.0 else 0.0


def gain(machine: tuple[str, str], workers: int, each: int, lone_steps: float) -> float:
    """Return the best split's capacity relative to mixed workers; 0 if none keeps the pace."""
    steps, target_s = steps_of(machine, workers * each), lone_steps * steps_of(machine, 1)(1)
    split = max(carries(steps, workers, count, target_s) for count in range(1, workers))
    return split / carries(steps, workers, 0, target_s)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("each", [2, 8, 16, 24])
def test_a_target_of_three_steps_gives_a_split_no_advantage(machine: tuple[str, str], workers: int, each: int):
    assert 1.0 < gain(machine, workers, each, 3.0) < 1.08


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_target_of_two_steps_favours_a_split_and_a_tighter_one_more(machine: tuple[str, str], workers: int):
    assert 1.15 < gain(machine, workers, 2, 2.0) < gain(machine, workers, 2, 1.5) < 2.1
    assert gain(machine, workers, 2, 1.25) > 2.0


def test_with_many_decodes_no_split_keeps_a_tight_pace():
    assert gain(("llama-3.1-8b", "rtx-4090"), 4, 24, 1.5) > 1.7
    assert gain(("llama-3.1-8b", "rtx-4090"), 2, 24, 1.5) == 0.0
    assert gain(("llama-3.1-8b", "rtx-4090"), 4, 16, 1.25) == 0.0
    assert gain(("llama-2-13b", "a100-40g"), 4, 16, 1.5) == 0.0


def test_at_its_maximum_load_a_split_is_at_its_limit():
    steps, target_s = steps_of(MACHINES[0], 32), 0.0252
    for prefilling in range(3):
        carried = carries(steps, 4, prefilling, target_s)
        assert pace_s(steps, 4, prefilling, carried) == pytest.approx(target_s)
        assert pressure(steps, 4, prefilling, carried, target_s) == pytest.approx(1.0)


def test_the_split_with_least_pressure_is_best():
    """The more prompts, the more prefill workers; with few, all do both, and with time to spare it matters little."""
    steps, target_s = steps_of(MACHINES[0], 32), 0.0252
    assert [best_split(steps, 4, prompts, target_s) for prompts in (0.1, 0.4, 1.2, 2.0)] == [0, 1, 2, 3]
    assert best_split(steps, 1, 0.5, target_s) == 0
    for prompts in (0.1, 0.4, 1.2, 2.0):
        best = best_split(steps, 4, prompts, 2 * target_s)
        assert pressure(steps, 4, best, prompts, 2 * target_s) > 0.9 * pressure(steps, 4, 0, prompts, 2 * target_s)
