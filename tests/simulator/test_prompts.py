"""Whose prompt a simulated worker computes first, as on real workers (`engine/worker/residency/test_budget.py`)."""

import msgspec
import pytest

from melld.scheduler.targets import LATE_TIMES, Targets
from melld.simulator.latency import ConstantLatency
from melld.simulator.settings import SimulatorSettings
from melld.simulator.simulation import Simulation
from melld.simulator.workload import Workload
from tests.simulator.setups import SMALL, one_by_one, scheduler

TTFT_S = 2.0
ONE = msgspec.structs.replace(
    SMALL, latency=ConstantLatency(decode_step_s=1e-6, prefill_token_s=0.01), gpus=1, targets=Targets(ttft_s=TTFT_S)
)
"""One worker that takes 10 ms for a token of a prompt."""


def first_tokens_s(load: Workload, settings: SimulatorSettings = ONE) -> list[float]:
    """Return when each request's first token comes."""
    return list(Simulation(settings, load, scheduler("load-balance", settings)).run().first_token_s)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """The long one takes longer by the short one, and by no more."""
    book, question = (0.0, 1000, 1), (1.0, 50, 1)
    assert first_tokens_s(one_by_one(book, question)) == pytest.approx([10.5, 1.5])
    untargeted = msgspec.structs.replace(ONE, targets=None)
    assert first_tokens_s(one_by_one(book, question), untargeted) == pytest.approx([10.0, 10.5])


def test_a_long_prompt_is_computed_in_time() -> None:
    """Short ones overtake it only while they are due earlier."""
    book, questions = (0.0, 500, 1), [(second, 50, 1) for second in range(1, 25)]
    read_s, *answered_s = first_tokens_s(one_by_one(book, *questions))
    assert read_s == pytest.approx(5.0 + 0.5 * sum(first_s < read_s for first_s in answered_s))
    assert read_s <= 20.0


def test_a_late_request_yields_to_one_that_can_still_be_on_time() -> None:
    """While a worker woke up, some became late: new arrivals are in time, and the others next."""
    waking = msgspec.structs.replace(ONE, wake_s=8.0)
    late, prompt = [(0.0, 50, 1)] * 8, (7.9, 50, 1)
    *late_s, first_s = first_tokens_s(one_by_one(*late, prompt), waking)
    assert first_s == pytest.approx(8.5)
    assert late_s == pytest.approx([9.0 + 0.5 * number for number in range(8)])
    again = [(second / 2, 50, 1) for second in range(16, 60)]
    late_s = first_tokens_s(one_by_one(*late, *again), waking)[:8]
    assert max(late_s) <= TTFT_S * (1 + LATE_TIMES) + 4.0, "and not for ever"
