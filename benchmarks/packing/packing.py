"""GPUs against the lower bound, with migrations beside them: every policy on real and generated load, several seeds.

    python -m benchmarks.packing.packing ../shared/traces --write benchmarks/results --plot docs/figures
    python -m benchmarks.packing.packing ../shared/traces --only paper --seeds 1

Each cell (machines, load, policy, links, seed) is kept under benchmarks/out/packing and computed anew only when the
source that it depends on has changed, so an interrupted run goes on where it stopped.  Tables go as JSON to the folder
that --write names (see tables.py).
"""

import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.harness import parser_of, record, source_of
from benchmarks.packing.packing_cells import Cell, Result, compute
from benchmarks.packing.paper_figures import draw_batching, draw_groups, draw_over_time
from melld.simulator.experiment import ALL_POLICIES
from melld.simulator.measures import Report

LOADS = {
    "conv": "Azure 2023 conversation",
    "code": "Azure 2023 code",
    "lmsys-0.5": "LMSYS x10, Poisson 0.5/s",
    "lmsys-0.8": "LMSYS x10, Poisson 0.8/s",
    "lmsys-1.1": "LMSYS x10, Poisson 1.1/s",
}
PAPER_LOADS = tuple(LOADS)
BASELINES = ("best-fit", "worst-fit", "load-balance")
MELLS = ("mell", "mell-plus")


def main() -> None:
    """Compute what is missing, print the tables, write and plot what is asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("traces", type=pathlib.Path, help="the folder of traces and lengths")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", action="append", help="names of tables (default: all)")
    parser.add_argument("--plot", type=pathlib.Path, help="a folder for the figures")
    arguments = parser.parse_args()
    wanted = {name: table for name, table in TABLES.items() if not arguments.only or name in arguments.only}
    cells = {cell for table in wanted.values() for cell in table.cells(range(arguments.seeds))}
    for cell in cells:
        source_of(cell.policy)
    results = compute(sorted(cells, key=msgspec.structs.astuple), arguments.traces, arguments.processes)
    for name, table in wanted.items():
        text = table.text(results, range(arguments.seeds))
        print(f"\n{name}\n\n{text}")
        if arguments.write:
            record(name, text)
    if arguments.plot:
        plot(arguments.plot, results, range(arguments.seeds))


# ---- tables


class Table:
    """Rows of cells; `show` makes a text of one cell's reports over the seeds."""

    def __init__(
        self,
        rows: Sequence[tuple[str, dict[str, object]]],
        policies: Sequence[str],
        show: Callable[..., str],
    ) -> None:
        self.rows = rows
        self.policies = [policy for policy in policies if policy in ALL_POLICIES]
        self.show = show

    def cells(self, seeds: Sequence[int]) -> list[Cell]:
        """Return all cells of the table."""
        return [Cell(policy=p, seed=s, **rest) for _, rest in self.rows for p in self.policies for s in seeds]  # type: ignore[arg-type]

    def text(self, results: dict[Cell, Result], seeds: Sequence[int]) -> str:
        """Return the table in Markdown."""
        lines = ["| load | " + " | ".join(self.policies) + " |", "|---" * (len(self.policies) + 1) + "|"]
        for label, rest in self.rows:
            shown = []
            for policy in self.policies:
                reports = [results[Cell(policy=policy, seed=seed, **rest)].report for seed in seeds]  # type: ignore[arg-type]
                shown.append(self.show(reports))
            lines.append(f"| {label} | " + " | ".join(shown) + " |")
        return "\n".join(lines)


def mean(reports: Sequence[Report], field: str) -> float:
    """Return the mean of one field over the seeds."""
    return statistics.mean(getattr(report, field) for report in reports)


def ratio_and_moves(reports: Sequence[Report]) -> str:
    """Ratio ± spread over seeds / migrations per request (preemptions per request, where there are any)."""
    ratios = [report.ratio for report in reports]
    spread = (max(ratios) - min(ratios)) / 2
    text = f"{statistics.mean(ratios):.3f} ± {spread:.3f} / {mean(reports, 'migrations_per_request'):.2f}"
    preemptions = mean(reports, "preemptions_per_request")
    return text + (f" ({preemptions:.3f})" if preemptions else "")


def moves(reports: Sequence[Report]) -> str:
    """Migrations per request and per second."""
    return f"{mean(reports, 'migrations_per_request'):.2f} / {mean(reports, 'migrations_per_s'):.2f}"


def rows(machines: Sequence[str], loads: Sequence[str]) -> list[tuple[str, dict[str, object]]]:
    """Return one row per machine set-up and load."""
    return [(f"{one}, {LOADS[load]}", {"machines": one, "load": load}) for one in machines for load in loads]


class Claims(Table):
    """The paper's claims beside what came out here, as ranges over machines and loads of means over seeds."""

    def text(self, results: dict[Cell, Result], seeds: Sequence[int]) -> str:
        """Return the table in Markdown."""

        def figures(policy: str, field: str) -> list[float]:
            return [
                mean([results[Cell(policy=policy, seed=seed, **rest)].report for seed in seeds], field)  # type: ignore[arg-type]
                for _, rest in self.rows
            ]

        def less(policy: str, base: str, field: str) -> str:
            pairs = zip(figures(policy, field), figures(base, field), strict=True)
            saved = [100 * (1 - ours / theirs) for ours, theirs in pairs]
            return f"{min(saved):.0f} to {max(saved):.0f} %"

        mells = [policy for policy in self.policies if policy not in BASELINES]
        lines = ["| the paper's claim | " + " | ".join(mells) + " |", "|---" * (len(mells) + 1) + "|"]
        for base in BASELINES:
            for field, name in (("mean_gpus", "time-mean"), ("peak_gpus", "peak")):
                shown = [less(policy, base, field) for policy in mells]
                lines.append(f"| 9 to 31 % fewer GPUs: against {base}, {name} | " + " | ".join(shown) + " |")
        shown = []
        for policy in mells:
            used = [100 * value for value in figures(policy, "utilisation")]
            shown.append(f"{min(used):.0f} to {max(used):.0f} %")
        lines.append("| utilisation of at least 88 % on average | " + " | ".join(shown) + " |")
        theirs = figures("load-balance", "migrations_per_request")
        shown = []
        for policy in mells:
            ours = figures(policy, "migrations_per_request")
            times = [one / other for one, other in zip(ours, theirs, strict=True) if other > 0.01]
            shown.append(f"{min(times):.1f} to {max(times):.1f} times")
        lines.append(
            "| fewer migrations than load balancing (here: how many times as many) | " + " | ".join(shown) + " |"
        )
        return "\n".join(lines)


BOTH = rows(("13B", "7B"), PAPER_LOADS)
TABLES = {
    "paper": Table(BOTH, (*BASELINES, *MELLS), ratio_and_moves),
    "claims": Claims(BOTH, (*BASELINES, *MELLS), str),
    "batching": Table(BOTH, ("mell", "mell-unbatched"), moves),
}


# ---- writing and drawing


def plot(folder: pathlib.Path, results: dict[Cell, Result], seeds: Sequence[int]) -> None:
    """Draw the paper's figures, of the 13B machines."""
    chosen = [policy for policy in (*BASELINES, *MELLS) if policy in ALL_POLICIES]

    def reports(load: str, policy: str) -> list[Report]:
        cells = (Cell("13B", load, policy, seed) for seed in seeds)
        return [results[cell].report for cell in cells if cell in results]

    groups = {
        LOADS[load].replace(", ", "\n").replace("conversation", "conv."): {p: reports(load, p) for p in chosen}
        for load in PAPER_LOADS
    }
    paths = draw_groups(folder, groups)
    pairs = {
        LOADS[load].partition(", ")[2]: {"mell": (reports(load, "mell"), unbatched)}
        for load in ("lmsys-0.5", "lmsys-0.8")
        if (unbatched := reports(load, "mell-unbatched"))
    }
    if len(pairs) == 2:
        paths += draw_batching(folder, pairs)
    samples = {}
    for policy in chosen:
        result = results.get(Cell("13B", "lmsys-1.1", policy, 0))
        if result is not None and result.samples is not None:
            samples[policy] = result.samples
    paths += draw_over_time(folder, samples)
    print("\n".join(map(str, paths)), file=sys.stderr)


if __name__ == "__main__":
    main()
