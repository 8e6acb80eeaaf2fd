"""The simulations behind `slo_table.py`: machines, targets, and a cache of what came out.

Owns how a load runs on machines.  Never judges a result.
"""

import hashlib
import pathlib

import msgspec

from benchmarks.harness import GIB, ROOT, kept, machine_settings, source_of
from benchmarks.targets.slo_loads import load_of
from melld.scheduler.policies.slo.policy import MellSlo
from melld.scheduler.targets import Targets
from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.links import LinkSettings
from melld.simulator.measures import Report
from melld.simulator.settings import SimulatorSettings

OUT = ROOT / "benchmarks" / "out" / "slo"
MACHINES = {
    "8b-4090": ("llama-3.1-8b", "rtx-4090"),
    "8b-h100": ("llama-3.1-8b", "h100-80g"),
    "13b-a100": ("llama-2-13b", "a100-40g"),
    "13b-h100": ("llama-2-13b", "h100-80g"),
}


class Cell(msgspec.Struct, frozen=True):
    """One simulation.  `retire_after_s`: how long a policy without a rule of its own keeps idle workers."""

    load: str
    machines: str
    itl_ms: float
    policy: str
    epoch_s: float = 0.5
    link_gib_s: float = 4.0
    wake_s: float = 8.0
    gpus: int | None = None
    seed: int = 0
    retire_after_s: float = 60.0


def settings_of(cell: Cell) -> SimulatorSettings:
    """Return the cell's machines, links and targets."""
    return machine_settings(
        *MACHINES[cell.machines],
        gpus=cell.gpus,
        epoch_s=cell.epoch_s,
        wake_s=cell.wake_s,
        link=LinkSettings(cell.link_gib_s * GIB),
        seed=cell.seed,
        targets=Targets(cell.itl_ms / 1e3),
    )


def result_of(cell: Cell, traces: pathlib.Path) -> Report:
    """Return the cell's report, from its file if the source that made it is the present one."""

    def simulated() -> Report:
        choices = SchedulerChoices(retire_after_s=None if cell.policy == MellSlo.name else cell.retire_after_s)
        load = load_of(cell.load, cell.machines, cell.seed, traces)
        return run_policy(cell.policy, settings_of(cell), load, choices).report

    name = f"{hashlib.sha256(repr(cell).encode()).hexdigest()[:16]}-{source_of(cell.policy)}.json"
    return kept(OUT / name, Report, simulated)
