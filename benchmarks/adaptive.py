"""Moves by KV, by tokens, or as the planner chooses: a grid of request length, link rate and compute that is left.

    python benchmarks/adaptive.py --write benchmarks/results
    python benchmarks/adaptive.py --only x10 --seeds 1 --processes 2

Simulated: the daemon's scheduler (`mell-plus`) and its planner of moves, machines of `MACHINES`, log-normal lengths,
moves that take time.  Every cell is run three times on the same arrivals: both ways open to the planner, or one.

The cost that is compared is the mean time of a move: from the scheduler's decision to the end of the move, deferral
included, whatever the end is (committed, called off, given up, or the request ended meanwhile).  For so long the
request counts on two workers, and for so long its source is as full as it was.  A cell's ratio is the cost with both
ways over the smaller one with a single way.

Each run is kept under benchmarks/out/adaptive and made anew only when the source that it depends on has changed.
"""

import argparse
import concurrent.futures
import hashlib
import pathlib
import random
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np
from cells import ROOT, kept, machine_settings, source_of
from tables import record

from melld.ids import RequestId
from melld.migrate.snapshot import Via
from melld.scheduler.events import AnyCommand, AnyEvent, MoveAborted, MoveCommitted, MoveRequest, RequestFinished
from melld.scheduler.scheduler import Scheduler
from melld.simulator.experiment import SchedulerChoices, make_scheduler
from melld.simulator.links import GIB, LinkSettings
from melld.simulator.measures import Report, Spread
from melld.simulator.simulation import Simulation
from melld.simulator.workload import LogNormal, poisson

OUT = ROOT / "benchmarks" / "out" / "adaptive"
MACHINES = ("llama-2-13b", "a100-40g")
EPOCH_S = 0.2
LOADS = {"x1": (1.0, 40.0, 120.0), "x3": (3.0, 4.5, 400.0), "x10": (10.0, 0.5, 1500.0)}
"""Factor of the lengths, arrivals a second, seconds of arrivals: about six workers' worth each."""
LINKS_GIB_S = (0.25, 1.0, 4.0, 16.0)
SHARES = {"low": 0.3, "high": 0.03}
"""By compute load: the share of a busy worker's time that is left for the prefill of others."""
MODES: dict[str, tuple[Via, ...]] = {"kv": (Via.KV,), "tokens": (Via.TOKENS,), "both": (Via.KV, Via.TOKENS)}
WITHIN = 1.1


class Cell(msgspec.Struct, frozen=True, order=True):
    """One simulation.  `mode`: the ways that are open."""

    load: str
    link_gib_s: float
    compute: str
    mode: str
    seed: int


class Result(msgspec.Struct, frozen=True):
    """`moves`: how long each took that has ended, see the module.  `by_tokens`: how many were committed that way."""

    report: Report
    moves: Spread
    count: int
    by_tokens: int
    on_two_workers_s: float


class Watched:
    """The scheduler, and beside it a book of when each move was decided and when it was over."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._decided_s: dict[RequestId, float] = {}
        self.took_s: list[float] = []
        self.by_tokens = 0

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        """Do as the scheduler's `handle` does."""
        if isinstance(event, MoveCommitted | MoveAborted | RequestFinished):
            decided_s = self._decided_s.pop(event.request, None)
            if decided_s is not None:
                self.took_s.append(event.at_s - decided_s)
                self.by_tokens += isinstance(event, MoveCommitted) and event.via == Via.TOKENS
        commands = self._scheduler.handle(event)
        for command in commands:
            if isinstance(command, MoveRequest):
                self._decided_s[command.request] = event.at_s
        return commands


def result_of(cell: Cell) -> Result:
    """Return the cell's result, from its file if the source that made it is the present one."""
    name = f"{cell.load}-{cell.link_gib_s:g}GiB-{cell.compute}-{cell.mode}-s{cell.seed}-{source()}"
    return kept(OUT / f"{name}.json", Result, lambda: simulate(cell))


def simulate(cell: Cell) -> Result:
    """Run one cell."""
    settings = machine_settings(
        *MACHINES,
        epoch_s=EPOCH_S,
        link=LinkSettings(cell.link_gib_s * GIB, ways=MODES[cell.mode], prefill_share=SHARES[cell.compute]),
        seed=cell.seed,
    )
    factor, rate_per_s, seconds = LOADS[cell.load]
    load = poisson(rate_per_s, seconds, LogNormal(), random.Random(cell.seed)).scaled(factor)
    watched = Watched(make_scheduler("mell-plus", settings, SchedulerChoices()))
    measures = Simulation(settings, load, watched).run()  # type: ignore[arg-type]
    took_s = np.array(watched.took_s)
    report = measures.report(cell.mode)
    return Result(report, Spread.of(took_s), took_s.size, watched.by_tokens, float(took_s.sum()))


def source() -> str:
    """Return a hash of what the figures depend on."""
    digest = hashlib.sha256(source_of("mell-plus").encode())
    for path in sorted((ROOT / "melld" / "migrate").glob("planner*.py")):
        digest.update(path.read_bytes())
    digest.update(repr((MACHINES, EPOCH_S, sorted(LOADS.items()), sorted(SHARES.items()))).encode())
    return digest.hexdigest()[:10]


def compute(cells: Sequence[Cell], processes: int) -> dict[Cell, Result]:
    """Return all results, from files where there are any."""
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        return dict(zip(cells, pool.map(result_of, cells), strict=True))


# ---- the table

Runs = dict[str, list[Result]]


def cost_s(results: Sequence[Result]) -> float:
    """Return the mean time of a move, over all seeds' moves."""
    return sum(one.on_two_workers_s for one in results) / max(sum(one.count for one in results), 1)


def ratio(runs: Runs) -> float:
    """Compare both ways with the better single one."""
    return cost_s(runs["both"]) / max(min(cost_s(runs["kv"]), cost_s(runs["tokens"])), 1e-9)


def costs(name: str, runs: Runs) -> str:
    """Return a line of the table."""
    shown = [f"{cost_s(runs[m]):.2f} ({statistics.mean(r.moves.p99 for r in runs[m]):.1f})" for m in MODES]
    tokens = sum(one.by_tokens for one in runs["both"]) / max(sum(one.report.migrations for one in runs["both"]), 1)
    worse = "" if ratio(runs) <= WITHIN else " **above**"
    return f"| {name} | {' | '.join(shown)} | {tokens:.0%} | {ratio(runs):.2f}{worse} |"


def table(results: dict[Cell, Result], loads: Sequence[str], seeds: int) -> str:
    """Lay out the costs in Markdown, and print how many are near the better way's."""
    lines = ["| length, link, compute load | kv | tokens | both | of these by tokens | ratio |", "|---" * 6 + "|"]
    ratios = []
    for load in loads:
        for link_gib_s in LINKS_GIB_S:
            for share in SHARES:
                cells = {m: [Cell(load, link_gib_s, share, m, seed) for seed in range(seeds)] for m in MODES}
                runs = {mode: [results[cell] for cell in some] for mode, some in cells.items()}
                lines.append(costs(f"{load}, {link_gib_s:g} GiB/s, {share}", runs))
                ratios.append(ratio(runs))
    within = sum(one <= WITHIN for one in ratios)
    print(
        f"Within 10 % of the better single way in {within} of {len(ratios)} cells; "
        f"largest ratio {max(ratios):.2f}, mean {statistics.mean(ratios):.2f}."
    )
    return "\n".join(lines)


def main() -> None:
    """Make what is missing, print the table, write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", action="append", choices=tuple(LOADS), help="lengths (default: all)")
    parser.add_argument("--write", type=pathlib.Path, help="a folder for the table, as JSON")
    arguments = parser.parse_args()
    loads = arguments.only or list(LOADS)
    cells = [
        Cell(load, link_gib_s, share, mode, seed)
        for load in loads
        for seed in range(arguments.seeds)
        for link_gib_s in LINKS_GIB_S
        for share in SHARES
        for mode in MODES
    ]
    text = table(compute(cells, arguments.processes), loads, arguments.seeds)
    print(text)
    if arguments.write:
        record(arguments.write, "adaptive-costs", text)


if __name__ == "__main__":
    main()
