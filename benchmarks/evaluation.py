"""What the paper shows beside GPUs and migrations, and a bound that is the same for all policies.

    python benchmarks/evaluation.py ../shared/traces --only optimum --write benchmarks/results
    python benchmarks/evaluation.py ../shared/traces --seeds 2 --write benchmarks/results

bound     GPU-seconds of each policy over a bound from the load and the machine alone (`packing_cells` runs the cells)
optimum   GPUs against the fewest that could hold the requests, at peak and at each instant, on small random instances
          (Theorem 2)
"""

import argparse
import pathlib
import random
import statistics
from collections.abc import Sequence
from fractions import Fraction

from packing import LOADS, PAPER_LOADS
from packing_cells import MACHINES, Cell, compute, load_of, settings_of
from tables import record

from melld.scheduler import events
from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.simulator.experiment import ALL_POLICIES
from melld.simulator.service import bound_gpu_s

POLICIES_SHOWN = ("best-fit", "worst-fit", "load-balance", "mell", "mell-plus")
CAPACITY, TRIALS, STEPS, MOST_LIVE = 1000, 100, 60, 13


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=pathlib.Path)
    parser.add_argument("--only", choices=("bound", "optimum"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", type=pathlib.Path)
    asked = parser.parse_args()
    tables = {
        "optimum": optimum_table,
        "bound": lambda: bound_table(asked.traces, range(asked.seeds), asked.processes),
    }
    for name, make in tables.items():
        if asked.only in (None, name):
            text = make()
            print(f"{name}\n{text}\n", flush=True)
            if asked.write:
                record(asked.write, name, text)


# ---- a bound for all


def bound_table(traces: pathlib.Path, seeds: Sequence[int], processes: int) -> str:
    """GPU-seconds over the common bound, means over the seeds."""
    rows = [(machines, load) for machines in MACHINES for load in PAPER_LOADS]
    cells = [Cell(*row, policy, seed) for row in rows for policy in POLICIES_SHOWN for seed in seeds]
    results = compute(cells, traces, processes)
    lines = [f"| load | {' | '.join(POLICIES_SHOWN)} |", "|---" * (len(POLICIES_SHOWN) + 1) + "|"]
    for machines, load in rows:
        bounds = {}
        for seed in seeds:
            cell = Cell(machines, load, "best-fit", seed)
            settings = settings_of(cell)
            bounds[seed] = bound_gpu_s(settings, load_of(cell, traces).limited(settings.most_tokens))
        shown = []
        for policy in POLICIES_SHOWN:
            used = {seed: results[Cell(machines, load, policy, seed)].report.gpu_seconds for seed in seeds}
            shown.append(f"{statistics.mean(used[seed] / bounds[seed] for seed in seeds):.2f}")
        lines.append(f"| {machines}, {LOADS[load]} | {' | '.join(shown)} |")
    return "\n".join(lines)


# ---- Theorem 2


def optimum(sizes: Sequence[int]) -> int:
    """Return the fewest bins of `CAPACITY` that hold these sizes: exact, by depth-first search."""
    ordered = sorted(sizes, reverse=True)
    best = len(ordered)

    def place(index: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if index == len(ordered):
            best = len(bins)
            return
        tried = set()
        for number, free in enumerate(bins):
            if ordered[index] <= free and free not in tried:
                tried.add(free)
                bins[number] -= ordered[index]
                place(index + 1, bins)
                bins[number] += ordered[index]
        bins.append(CAPACITY - ordered[index])
        place(index + 1, bins)
        bins.pop()

    place(0, [])
    return best


def one_instance(policy: str, seed: int) -> tuple[Fraction, Fraction]:
    """Peak over peak of the optimum, and the worst instant, of requests that come, grow and end at random."""
    chance = random.Random(seed)
    settings = SchedulerSettings(ClusterSettings(instant_moves=True))
    scheduler = Scheduler(ALL_POLICIES[policy], settings)
    for number in range(2 * MOST_LIVE):
        scheduler.handle(events.WorkerUp(0.0, f"w{number}", CAPACITY))  # type: ignore[arg-type]
    live: dict[str, int] = {}
    peak = peak_optimum = 0
    worst = Fraction(0)
    for step in range(STEPS):
        if live and chance.random() < 0.5:
            gone = chance.choice(sorted(live))
            del live[gone]
            scheduler.handle(events.RequestFinished(float(step), gone))  # type: ignore[arg-type]
        if len(live) < MOST_LIVE:
            live[f"r{step}"] = chance.randint(CAPACITY // 8, int(0.6 * CAPACITY))
            scheduler.handle(events.RequestArrived(float(step), f"r{step}", live[f"r{step}"]))  # type: ignore[arg-type]
        grown = {name: min(size + chance.randint(0, 10), CAPACITY) for name, size in live.items()}
        live.update(grown)
        scheduler.handle(events.RequestsGrew(float(step), grown))  # type: ignore[arg-type]
        scheduler.handle(events.EpochStarted(float(step)))
        gpus, fewest = len(scheduler.cluster.active), optimum(list(live.values()))
        peak, peak_optimum = max(peak, gpus), max(peak_optimum, fewest)
        worst = max(worst, Fraction(gpus, max(fewest, 1)))
    return Fraction(peak, peak_optimum), worst


def optimum_table() -> str:
    """Over all instances."""
    lines = ["| policy | peak over optimum's: mean | most | above 4/3 | worst instant |", "|---|---|---|---|---|"]
    for policy in ("mell-literal", "mell", "mell-plus"):
        found = [one_instance(policy, seed) for seed in range(TRIALS)]
        peaks = [float(peak) for peak, _ in found]
        above = sum(peak > Fraction(4, 3) for peak, _ in found)
        worst = float(max(instant for _, instant in found))
        lines.append(
            f"| {policy} | {statistics.mean(peaks):.3f} | {max(peaks):.2f} | {above} of {TRIALS} | {worst:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
