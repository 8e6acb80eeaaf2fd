"""Several policies on one workload: what `melld simulate` and the benchmarks run.

Owns the way from a policy's name to its scheduler, and the pairing of reports with what they were made of.  Every
policy sees the same arrivals on the same machines with the same seed.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.names import POLICIES
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.simulator.journal import Sink
from melld.simulator.measures import Report, Samples
from melld.simulator.settings import SimulatorSettings
from melld.simulator.simulation import Simulation
from melld.simulator.workload import Workload

UNBATCHED_SUFFIX = "-unbatched"


class SchedulerChoices(msgspec.Struct, frozen=True):
    """What a run may set of the scheduler.  `horizon_s` None: what the machines' times ask for."""

    batching: bool = True
    horizon_s: float | None = None
    retire_after_s: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """A report and the samples over time that it summarises."""

    report: Report
    samples: Samples


def unbatched(policy: str) -> str:
    """The name of the policy's form that carries out each operation at once: its own where it has no batches."""
    name = policy + UNBATCHED_SUFFIX
    return name if name in POLICIES else policy


def horizon_s(settings: SimulatorSettings) -> float:
    """How far ahead growth must be reckoned: until the next epoch, and while a large request is on its way.

    To that comes the time of one block's tokens: memory is taken in blocks, and several requests may take theirs at
    once.  None at all in the paper's time slots, where an overflow is cured in the slot in which it happens.
    """
    if settings.paper_slots and settings.link is None:
        return 0.0
    half_full = np.array([settings.most_tokens / 2])
    block_s = settings.block_tokens * float(settings.latency.step_s(np.array([8.0]), half_full)[0])
    transfer_s = 0.0
    if settings.link is not None:
        transfer_s = settings.link.delay_s + settings.capacity_bytes / 8 / settings.link.bytes_per_s
    return settings.epoch_s + transfer_s + block_s


def make_scheduler(policy: str, settings: SimulatorSettings, choices: SchedulerChoices) -> Scheduler:
    """The daemon's scheduler under the named policy.

    Raises:
        KeyError: no such policy.
    """
    ahead_s = horizon_s(settings) if choices.horizon_s is None else choices.horizon_s
    cluster = ClusterSettings(horizon_s=ahead_s, instant_moves=settings.instant_moves)
    factory = POLICIES[policy if choices.batching else unbatched(policy)]
    return Scheduler(factory, SchedulerSettings(cluster=cluster, retire_after_s=choices.retire_after_s))


def run_policy(
    policy: str,
    settings: SimulatorSettings,
    workload: Workload,
    choices: SchedulerChoices,
    log: Sink | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Simulate one policy from the first arrival until every request has ended."""
    simulation = Simulation(settings, workload, make_scheduler(policy, settings, choices), log)
    measures = simulation.run(progress)
    return Outcome(measures.report(policy, workload.arrival_s), measures.samples)
