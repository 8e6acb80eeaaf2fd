"""Promises of placement by prefixes: prompts go where their beginning is, if they are served as well there."""

from collections.abc import Mapping

import pytest

from melld.scheduler import events as e
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.targets import Targets
from tests.scheduler.driving import arrive, of_kind, placed, scheduler_with

TOKENS = 400


def two_in_service() -> Scheduler:
    """Memory asks for both workers, w0 fuller; a prompt token takes a millisecond, a step ten."""
    scheduler = scheduler_with(3, "mell-slo", cluster=ClusterSettings(targets=Targets(itl_s=0.05)))
    paces = [
        e.WorkerPace(
            step_s=0.01, decodes=1.0, kv_bytes=100.0, prompts=10, prompt_tokens=tokens, prefill_s=1e-3 * tokens
        )
        for tokens in (500, 4000)
    ]
    assert placed(arrive(scheduler, "first", 600)) == {"first": "w0"}
    assert placed(arrive(scheduler, "second", 500)) == {"second": "w1"}
    for tenth in range(1, 40):
        scheduler.handle(e.WorkersPaced(0.1 * tenth, dict(zip(("w0", "w1"), paces, strict=True))))
        scheduler.handle(e.EpochStarted(0.1 * tenth))
    return scheduler


def where(scheduler: Scheduler, cached_tokens: Mapping[str, int], at_s: float = 60.0, name: str = "asked") -> str:
    """Return the worker that a further prompt is given to."""
    event = e.RequestArrived(at_s, name, 5, TOKENS, 0, "", cached_tokens)
    commands = scheduler.handle(event)
    assert of_kind(commands, e.ActivateWorker) == []
    return placed(commands)[name]


def test_a_prompt_goes_where_its_beginning_is() -> None:
    """Most of it need not be computed there, whichever of the two is the emptier."""
    assert where(two_in_service(), {"w0": 350}) == "w0"
    assert where(two_in_service(), {"w1": 350}) == "w1"
    assert where(two_in_service(), {"w0": 64, "w1": 350}) == "w1"
    assert where(two_in_service(), {"w0": 350, "w1": 64}) == "w0"


def test_a_few_cached_tokens_decide_nothing() -> None:
    """What saves less than a reader notices leaves the choice as it is."""
    blind = where(two_in_service(), {})
    other = "w1" if blind == "w0" else "w0"
    assert where(two_in_service(), {other: 16}) == blind
    assert where(two_in_service(), {other: 350}) == other


def test_nobody_queues_behind_others_for_its_prefix() -> None:
    """A common beginning does not gather all on one worker: the backlog counts against it."""
    scheduler = two_in_service()
    found = [where(scheduler, {"w0": 350}, 60.0, f"r{number}") for number in range(16)]
    assert found[0] == "w0"
    assert len(set(found)) > 1


@pytest.mark.parametrize("cached", [{"w2": 399}, {"gone": 399}])
def test_a_sleeping_worker_is_not_woken_for_what_it_holds(cached: Mapping[str, int]) -> None:
    """A wake costs more than a prefill; a worker that is gone holds nothing."""
    assert where(two_in_service(), cached) == where(two_in_service(), {})
