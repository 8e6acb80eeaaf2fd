"""The cells of `packing.py`: single simulations, computed once and kept in files named after the source that made them.

Owns loads, machines and the cache under benchmarks/out/packing.  Never judges a result.
"""

import concurrent.futures
import pathlib
import random
import re
import sys
import time
from collections.abc import Sequence

import msgspec
from cells import GIB, ROOT, kept, machine_settings, source_of

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
    found: dict[Cell, Result] = {}
    missing = []
    for cell in cells:
        path = path_of(cell)
        if path.exists():
            found[cell] = msgspec.json.decode(path.read_bytes(), type=Result)
        else:
            missing.append(cell)
    print(f"{len(found)} cells kept, {len(missing)} to compute", file=sys.stderr)
    began_s = time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(simulate, cell, traces): cell for cell in missing}
        for count, future in enumerate(concurrent.futures.as_completed(futures), 1):
            found[futures[future]] = future.result()
            if count % 10 == 0:
                print(f"{count}/{len(missing)} cells, {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return found


def adopt(policy: str, traces: pathlib.Path) -> None:
    """Rename the policy's latest older cells to the present source if its probes give what they hold."""
    probes = [Cell("13B", "lmsys-1.1", policy, 0), Cell("7B", "conv", policy, 0)]
    fresh = source_of(policy)
    older: dict[str, list[pathlib.Path]] = {}
    for path in OUT.glob(f"*-{policy}-*.json"):
        name, _, source = path.stem.rpartition("-")
        if source != fresh and re.search(rf"-{re.escape(policy)}(-[0-9.]+GiB)?-e[0-9.]+-s[0-9]+$", name):
            older.setdefault(source, []).append(path)
    for source, paths in sorted(older.items(), key=lambda item: -max(path.stat().st_mtime for path in item[1])):
        held = {probe: _older(probe, source) for probe in probes if _older(probe, source).exists()}
        kept = [msgspec.json.decode(path.read_bytes(), type=Result).report for path in held.values()]
        if kept and kept == [simulate(probe, traces).report for probe in held]:
            print(f"{policy}: {len(paths)} cells of {source} kept as {fresh}", file=sys.stderr)
            for path in paths:
                path.rename(path.with_name(path.name.replace(source, fresh)))
            return


def _older(cell: Cell, source: str) -> pathlib.Path:
    """Return where the cell would be if the given source had made it."""
    return path_of(cell).with_name(path_of(cell).name.replace(source_of(cell.policy), source))


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
    kind, _, rate = cell.load.partition("-")
    if cell.load == "conv":
        return workloads.read_trace(conversation).thinned(0.8, chance).until(HALF_HOUR_S)
    if cell.load == "code":
        return workloads.read_trace(traces / "azure2023_code.csv.gz").thinned(0.8, chance)
    if cell.load == "conv-2":
        return workloads.read_trace(conversation).thinned(0.8, chance).stretched(2.0).until(HOUR_S)
    if cell.load == "lmsys-conv":
        arrivals = workloads.read_trace(conversation).thinned(0.8, chance).stretched(1.1)
        return arrivals.with_lengths(workloads.read_lengths(lengths), chance).until(HOUR_S).scaled(10)
    drawn = workloads.LogNormal() if kind == "normal" else workloads.read_lengths(lengths)
    return workloads.poisson(float(rate), HOUR_S, drawn, chance).scaled(10)


def path_of(cell: Cell) -> pathlib.Path:
    """Return where the cell's result is kept: the name says what it is and which source made it."""
    link = f"-{cell.link_gib_s:g}GiB" if cell.link_gib_s else ""
    name = f"{cell.machines}-{cell.load}-{cell.policy}{link}-e{cell.epoch_s:g}-s{cell.seed}-{source_of(cell.policy)}"
    return OUT / f"{name}.json"
