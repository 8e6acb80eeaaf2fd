"""The simulations behind `slo_table.py`: loads, machines, targets, and a cache of what came out.

Owns which load runs on which machines.  Never judges a result.
"""

import functools
import hashlib
import math
import pathlib
import random

import msgspec
from cells import GIB, ROOT, kept, machine_settings, source_of

from melld.scheduler.policies.slo.policy import MellSlo
from melld.scheduler.targets import Targets
from melld.simulator import workload as workloads
from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.links import LinkSettings
from melld.simulator.measures import Report
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload

OUT = ROOT / "benchmarks" / "out" / "slo"
MACHINES = {
    "8b-4090": ("llama-3.1-8b", "rtx-4090"),
    "8b-h100": ("llama-3.1-8b", "h100-80g"),
    "13b-a100": ("llama-2-13b", "a100-40g"),
    "13b-h100": ("llama-2-13b", "h100-80g"),
}
LONG_S, SHORT_S, DAY_S = 1800.0, 900.0, 14_400.0
NIGHT, NOON = 0.1, 1.9
"""The least and the most of a day's rate, as parts of its mean."""


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


@functools.cache
def load_of(load: str, machines: str, seed: int, traces: pathlib.Path) -> Workload:
    """Return the cell's load.

    Raises:
        ConfigError: its file is not there.
    """
    chance = random.Random(seed)
    conversation = traces / "azure2023_conv.csv.gz"
    match load:
        case "conv":
            found = workloads.read_trace(conversation)
            return found.until(LONG_S) if machines == "13b-a100" else found
        case "conv20":
            return workloads.read_trace(conversation).stretched(20.0)
        case "code":
            return workloads.read_trace(traces / "azure2023_code.csv.gz")
        case "arxiv":
            lengths = workloads.read_lengths(traces / "lengths_arxiv_summarization.csv.gz")
            return workloads.poisson(6.0, SHORT_S, lengths, chance)
        case "lmsys":
            lengths = workloads.read_lengths(traces / "lengths_lmsys_chat_1m.csv.gz")
            return workloads.poisson(8.0, SHORT_S, lengths, chance).scaled(4)
        case "day":
            return day(workloads.read_lengths(conversation), 4.0, chance)
        case "normal":
            return workloads.poisson(6.0, SHORT_S, workloads.LogNormal(400.0, 1.0, 150.0, 0.9), chance)
        case "waves":
            return waves(workloads.LogNormal(800.0, 1.0, 120.0, 0.9), chance)
    raise ValueError(load)


def day(lengths: list[workloads.Lengths], mean_rate: float, chance: random.Random) -> Workload:
    """Return a day in four hours: two nights at a tenth of the mean rate, two noons at twice of it."""

    def rate(at_s: float) -> float:
        swing = math.cos(4 * math.pi * at_s / DAY_S)
        return mean_rate * ((NIGHT + NOON) / 2 - (NOON - NIGHT) / 2 * swing)

    return _thinned(rate, mean_rate * NOON, DAY_S, lengths, chance)


def waves(lengths: workloads.LogNormal, chance: random.Random) -> Workload:
    """Return bursts: every two minutes 20 s at 24 requests a second, 1 a second between them."""
    return _thinned(lambda at_s: 24.0 if at_s % 120.0 < 20.0 else 1.0, 24.0, SHORT_S, lengths, chance)


def _thinned(rate, most, seconds, lengths, chance) -> Workload:  # type: ignore[no-untyped-def]
    made = workloads.poisson(most, seconds, lengths, chance)
    kept = [index for index, at_s in enumerate(made.arrival_s) if chance.random() * most < rate(at_s)]
    columns = (made.arrival_s, made.prompt_tokens, made.output_tokens)
    return Workload(*([column[index] for index in kept] for column in columns))


def result_of(cell: Cell, traces: pathlib.Path) -> Report:
    """Return the cell's report, from its file if the source that made it is the present one."""

    def simulated() -> Report:
        choices = SchedulerChoices(retire_after_s=None if cell.policy == MellSlo.name else cell.retire_after_s)
        load = load_of(cell.load, cell.machines, cell.seed, traces)
        return run_policy(cell.policy, settings_of(cell), load, choices).report

    name = f"{hashlib.sha256(repr(cell).encode()).hexdigest()[:16]}-{source_of(cell.policy)}.json"
    return kept(OUT / name, Report, simulated)
