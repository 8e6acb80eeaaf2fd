"""The cells of `packing.py`: single simulations, computed once and kept in files named after the source that made them.

Owns loads, machines and the cache under benchmarks/out/packing.  Never judges a result.
"""

import concurrent.futures
import itertools
import pathlib
import random
from collections.abc import Sequence

import msgspec

from benchmarks.harness import GIB, ROOT, kept, machine_settings, source_of
from melld.simulator import workload as workloads
from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.links import LinkSettings
from melld.simulator.measures import Report, Samples
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload

OUT = ROOT / "benchmarks" / "out" / "packing"
HOUR_S = 3600.0
HALF_HOUR_S = 1800.0
MACHINES = {"13B": ("llama-2-13b", "a100-40g"), "7B": ("llama-2-7b", "rtx-4090")}


class Cell(msgspec.Struct, frozen=True):
    """One simulation.  `link_gib_s` zero: the paper's time slots of one second, moves instant."""

    machines: str
    load: str
    policy: str
    seed: int
    link_gib_s: float = 0.0
    epoch_s: float = 1.0


class Result(msgspec.Struct, frozen=True):
    """What a cell's file holds; the samples only of the first seed."""

    report: Report
    samples: Samples | None


def compute(cells: Sequence[Cell], traces: pathlib.Path, processes: int) -> dict[Cell, Result]:
    """Return all results, from files where they are fresh."""
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        return dict(zip(cells, pool.map(simulate, cells, itertools.repeat(traces)), strict=True))


def simulate(cell: Cell, traces: pathlib.Path) -> Result:
    """Run one cell and keep its result."""

    def simulated() -> Result:
        outcome = run_policy(cell.policy, settings_of(cell), load_of(cell, traces), SchedulerChoices())
        return Result(outcome.report, outcome.samples if cell.seed == 0 else None)

    return kept(path_of(cell), Result, simulated)


def settings_of(cell: Cell) -> SimulatorSettings:
    """Return the cell's machines and links."""
    return machine_settings(
        *MACHINES[cell.machines],
        epoch_s=cell.epoch_s,
        paper_slots=cell.link_gib_s == 0.0,
        link=LinkSettings(cell.link_gib_s * GIB) if cell.link_gib_s else None,
        seed=cell.seed,
    )


def load_of(cell: Cell, traces: pathlib.Path) -> Workload:
    """Return the cell's load: as `melld simulate` would make it from the same seed."""
    chance = random.Random(cell.seed)
    lengths = traces / "lengths_lmsys_chat_1m.csv.gz"
    conversation = traces / "azure2023_conv.csv.gz"
    if cell.load == "conv":
        return workloads.read_trace(conversation).thinned(0.8, chance).until(HALF_HOUR_S)
    if cell.load == "code":
        return workloads.read_trace(traces / "azure2023_code.csv.gz").thinned(0.8, chance)
    rate = float(cell.load.removeprefix("lmsys-"))
    return workloads.poisson(rate, HOUR_S, workloads.read_lengths(lengths), chance).scaled(10)


def path_of(cell: Cell) -> pathlib.Path:
    """Return where the cell's result is kept: the name says what it is and which source made it."""
    link = f"-{cell.link_gib_s:g}GiB" if cell.link_gib_s else ""
    name = f"{cell.machines}-{cell.load}-{cell.policy}{link}-e{cell.epoch_s:g}-s{cell.seed}-{source_of(cell.policy)}"
    return OUT / f"{name}.json"
