"""What the scheduler hears about the workers' steps."""

import pytest

from melld.engine.fleet.paces import PaceMeter
from melld.engine.wire.messages import BlockReport, StepDone
from melld.scheduler.events import WorkerPace
from melld.scheduler.steptimes import StepCosts

COSTS = StepCosts(0.010, 0.001, 0.0001)


def step(step_s: float, decodes: int = 0, prompt_tokens: int = 0) -> StepDone:
    blocks = BlockReport(1, 8, 0, {})
    return StepDone(1, step_s, blocks, leases={}, gone=[], decodes=decodes, prompt_tokens=prompt_tokens)


def test_steps_without_prompts_are_reported_as_means() -> None:
    """Seconds, requests and bytes read belong together."""
    meter = PaceMeter()
    meter.stepped(step(0.010, decodes=1), 100, None, 1)
    meter.stepped(step(0.020, decodes=3), 300, None, 0)
    assert meter.take() == WorkerPace(pytest.approx(0.015), 2.0, 200.0)
    assert meter.take() is None


def test_a_finished_prompt_s_cost_excludes_the_decodes() -> None:
    """Two chunks of a prompt, one of them beside two requests."""
    meter = PaceMeter()
    meter.stepped(step(0.110, prompt_tokens=1000), 100, COSTS, 0)
    assert meter.take() is None
    meter.stepped(step(0.112, decodes=2, prompt_tokens=1000), 100, COSTS, 1)
    assert meter.take() == WorkerPace(0.0, 0.0, 0.0, 1, 2000, pytest.approx(0.210))
    assert meter.take() is None


def test_a_step_of_unknown_cost_reports_nothing_of_its_prompt() -> None:
    """A guess would be learned as a fact."""
    meter = PaceMeter()
    meter.stepped(step(0.112, decodes=2, prompt_tokens=1000), 100, None, 1)
    assert meter.take() is None
