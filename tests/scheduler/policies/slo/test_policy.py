"""Promises of mell-slo: targets kept, with no more workers than that takes, and none without targets."""

import math

import msgspec
import pytest

from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.events import EpochStarted, RetireWorker
from melld.scheduler.targets import Targets
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload
from tests.scheduler.driving import arrive, finish, of_kind, scheduler_with
from tests.simulator.setups import PAPER_SLOTS, PROMISED, SMALL, one_by_one, small_load
from tests.simulator.test_simulation import simulate

ROOMY = msgspec.structs.replace(PROMISED, capacity_bytes=8 * SMALL.capacity_bytes)


def steady(rate_per_s: float = 6.0) -> Workload:
    """Six requests a second for two minutes, each of 20 to 30 s."""
    return small_load(rate_per_s=rate_per_s, seconds=120.0)


@pytest.mark.parametrize("settings", [SMALL, PAPER_SLOTS], ids=["instant moves", "paper slots"])
def test_without_targets_it_decides_as_mell_plus(settings: SimulatorSettings) -> None:
    """Who promises nothing gets the fewest GPUs for the memory: the paper's figures stay."""
    packed, promised = (simulate(policy, settings, small_load()) for policy in ("mell-plus", "mell-slo"))
    assert msgspec.structs.replace(promised, policy="mell-plus") == packed


@pytest.mark.parametrize(("settings", "rate_per_s"), [(PROMISED, 6.0), (ROOMY, 24.0)], ids=["few each", "many each"])
def test_nearly_all_requests_are_served_in_time(settings: SimulatorSettings, rate_per_s: float) -> None:
    """The promise itself, with waking times, moves that take time, and growth that nobody knows."""
    report = simulate("mell-slo", settings, steady(rate_per_s))
    assert report.attainment is not None
    assert report.attainment >= 0.985


def test_prompts_alone_can_ask_for_more_workers() -> None:
    """Memory and steps have room, but the prompts of an even share would fill a worker's time."""
    prompts = one_by_one(*((1.0 + 0.1 * number, 1500, 4) for number in range(3600)))
    report = simulate("mell-slo", ROOMY, prompts)
    assert report.attainment is not None
    assert report.attainment >= 0.97
    assert report.peak_gpus >= 2
    assert report.gpu_seconds < 4.5 * report.window_s, "and for no more than that takes"


def test_a_tighter_pace_takes_more_workers() -> None:
    """The number of workers follows the target, not the memory alone."""

    class Growing(msgspec.Struct, frozen=True):
        """Steps that take longer in larger batches."""

        def step_s(self, batch, context_tokens):  # type: ignore[no-untyped-def]
            return 0.02 + 0.0005 * batch + 0.0 * context_tokens

        def prefill_s(self, tokens: float) -> float:
            return tokens * 0.0001

    loose, tight = (
        simulate(
            "mell-slo", msgspec.structs.replace(ROOMY, latency=Growing(), targets=Targets(itl_s=itl_s)), steady(8.0)
        )
        for itl_s in (0.1, 0.03)
    )
    assert loose.attainment is not None
    assert tight.attainment is not None
    assert min(loose.attainment, tight.attainment) >= 0.97
    assert tight.gpu_seconds > 1.5 * loose.gpu_seconds


@pytest.mark.long
def test_who_aims_lower_pays_less() -> None:
    """The part of the requests that may be slow is the operator's to choose."""
    loads = (msgspec.structs.replace(ROOMY, targets=Targets(itl_s=0.03, attainment=part)) for part in (0.9, 0.999))
    low, high = (simulate("mell-slo", settings, steady(24.0)) for settings in loads)
    assert low.gpu_seconds < high.gpu_seconds
    assert high.attainment is not None
    assert high.attainment >= 0.985


def test_a_burst_after_silence_finds_the_worker_that_bursts_have_needed() -> None:
    """Gaps of a few seconds are bridged awake, so that only the first burst waits for waking."""
    bursts = one_by_one(*((10.0 * burst + 0.01 * one, 100, 20) for burst in range(30) for one in range(5)))
    report = simulate("mell-slo", PROMISED, bursts)
    assert report.attainment == 1.0
    assert report.activations <= 3


def test_long_silences_are_slept_through() -> None:
    """A worker that is needed every ten minutes does not stay awake between."""
    rare = one_by_one(*((600.0 * number, 100, 50) for number in range(6)))
    assert simulate("mell-slo", PROMISED, rare).gpu_seconds < 6 * 60.0


def test_with_too_few_workers_those_that_are_served_are_served_in_time() -> None:
    """Under overload nearly all that is not sent away meets its targets: work for late requests helps nobody."""
    few = msgspec.structs.replace(ROOMY, gpus=1)
    report = simulate("mell-slo", few, steady(30.0))
    assert report.attainment is not None
    assert report.refused > 0.1 * report.requests
    served = report.attainment * report.requests / (report.requests - report.refused)
    assert served > 0.9
    packed = simulate("mell-plus", few, steady(30.0))
    assert packed.attainment is not None
    assert report.attainment > 2 * packed.attainment


def test_who_forbids_it_has_nobody_sent_away() -> None:
    """An operator may prefer late answers to none."""
    refused = [
        simulate(
            "mell-slo",
            msgspec.structs.replace(ROOMY, gpus=1, targets=Targets(itl_s=0.03, sheds=sheds)),
            small_load(rate_per_s=30.0, seconds=30.0),
        ).refused
        for sheds in (True, False)
    ]
    assert refused[0] > 100
    assert refused[1] == 0


def test_a_pace_that_not_even_a_lone_request_gets_wakes_nobody() -> None:
    """More workers would bring it no nearer: they are as many as for twice the lone step."""
    twice, hopeless = (
        simulate("mell-slo", msgspec.structs.replace(ROOMY, targets=Targets(itl_s=itl_s)), steady())
        for itl_s in (0.04, 0.001)
    )
    assert hopeless.itl_attainment == 0.0
    assert hopeless.ttft_attainment == twice.ttft_attainment
    assert hopeless.gpu_seconds <= 1.1 * twice.gpu_seconds


@pytest.mark.parametrize(("retire_after_s", "longest_s"), [(3.0, 4.0), (math.inf, math.inf), (None, 40.0)])
def test_idle_workers_sleep_when_the_operator_says(retire_after_s: float | None, longest_s: float) -> None:
    """What is configured is kept, never included; only without it does the policy reckon how long pays."""
    settings = ClusterSettings(targets=Targets(itl_s=0.05), retire_after_s=retire_after_s)
    scheduler = scheduler_with(2, "mell-slo", cluster=settings)
    arrive(scheduler, "only", 10)
    finish(scheduler, "only", 10.0)
    slept_s = math.inf
    for tenth in range(100, 1000):
        told_s = scheduler.policy.sleeps_in_s(scheduler.cluster.workers["w0"])
        if of_kind(scheduler.handle(EpochStarted(tenth / 10)), RetireWorker):
            slept_s = tenth / 10 - 10.0
            break
    assert told_s > 100.0 if slept_s == math.inf else told_s < 0.2
    assert (retire_after_s or 5.0) <= slept_s <= longest_s
