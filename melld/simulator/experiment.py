"""Runs of several policies on one workload, for `melld simulate` and the benchmarks.

Owns the names of the variants that only simulations compare; one joins the policies' tests by being named here.  Makes
a scheduler from a policy's name and pairs reports with their samples.  Every policy gets the same arrivals on the same
machines with the same seed.
"""

from functools import partial

import msgspec
import numpy as np

from melld import __version__
from melld.decisions.records import header_record
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.policies.mell.policy import Mell
from melld.scheduler.policies.names import POLICIES, Policies
from melld.scheduler.priorities import Priorities
from melld.scheduler.roles import RoleSettings
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.simulator.measures import Report, Samples
from melld.simulator.settings import SimulatorSettings
from melld.simulator.simulation import Simulation, Sink
from melld.simulator.workload import Workload

ALL_POLICIES: Policies = {
    **POLICIES,
    "mell-unbatched": partial(Mell, batching=False),
}


class SchedulerChoices(msgspec.Struct, frozen=True):
    """Scheduler settings of a run.  None: `horizon_s` by the machines' times, `retire_after_s` by the policy."""

    horizon_s: float | None = None
    retire_after_s: float | None = None
    roles: RoleSettings = RoleSettings()
    priorities: Priorities = Priorities()


class PolicyOutcome(msgspec.Struct, frozen=True):
    """A report and the samples over time that it summarises."""

    report: Report
    samples: Samples


def horizon_s(settings: SimulatorSettings) -> float:
    """Return the horizon for growth estimates: one epoch, a large transfer and one block's tokens.

    Memory is taken in blocks, and several requests may take one at once: hence the time of a block's tokens.  Zero in
    the paper's time slots, where an overflow is cured in the slot in which it happens.
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
    """Return the daemon's scheduler with the named policy.

    Raises:
        KeyError: no such policy.
    """
    ahead_s = horizon_s(settings) if choices.horizon_s is None else choices.horizon_s
    cluster = ClusterSettings(
        horizon_s=ahead_s,
        instant_moves=settings.instant_moves,
        targets=settings.targets,
        retire_after_s=choices.retire_after_s,
        roles=choices.roles,
        priorities=choices.priorities,
        kv_between_machines=settings.link is None or settings.link.kv_between_machines,
    )
    return Scheduler(ALL_POLICIES[policy], SchedulerSettings(cluster=cluster))


def run_policy(
    policy: str,
    settings: SimulatorSettings,
    workload: Workload,
    choices: SchedulerChoices,
    log: Sink | None = None,
) -> PolicyOutcome:
    """Simulate one policy from the first arrival until every request has ended."""
    scheduler = make_scheduler(policy, settings, choices)
    if log is not None:
        log(header_record(policy, scheduler.settings, 0.0, None, __version__))
    simulation = Simulation(settings, workload, scheduler, log)
    measures = simulation.run()
    return PolicyOutcome(measures.report(policy), measures.samples)
