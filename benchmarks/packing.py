"""GPUs against the lower bound, with migrations beside them: every policy on real and generated load, several seeds.

    python benchmarks/packing.py ../shared/traces --write docs/results.md --plot docs/results
    python benchmarks/packing.py ../shared/traces --only table:paper --seeds 1

Each cell (machines, load, policy, links, seed) is kept under benchmarks/out/packing and computed anew only when the
source that it depends on has changed, so an interrupted run goes on where it stopped.  With --adopt, a policy whose
source has changed is tried on one cell first; if that gives the same report to the last digit, its other cells are
taken as they are.  Tables replace what stands between `<!-- NAME -->` and `<!-- end -->` in the file given by --write.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import pathlib
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from melld.scheduler.policies import POLICIES
from melld.simulator import workload as workloads
from melld.simulator.catalogue import CARDS, MODELS, kv_capacity_bytes
from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.latency import profile_for
from melld.simulator.links import LinkSettings
from melld.simulator.measures import Report, Samples
from melld.simulator.plots import draw_batching, draw_groups, draw_over_time
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload

ROOT = pathlib.Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "out" / "packing"
GIB = 2**30
HOUR_S = 3600.0
MACHINES = {"13B": ("llama-2-13b", "a100-40g"), "7B": ("llama-2-7b", "rtx-4090")}
LOADS = {
    "conv": "Azure 2023 conversation",
    "code": "Azure 2023 code",
    "lmsys-0.5": "LMSYS x10, Poisson 0.5/s",
    "lmsys-0.8": "LMSYS x10, Poisson 0.8/s",
    "lmsys-1.1": "LMSYS x10, Poisson 1.1/s",
    "lmsys-conv": "LMSYS x10, Azure conversation arrivals at 1.1/s",
    "conv-2": "Azure conversation at 2/s",
    "normal-0.5": "log-normal x10, Poisson 0.5/s",
    "normal-1.1": "log-normal x10, Poisson 1.1/s",
}
PAPER_LOADS = ("conv", "code", "lmsys-0.5", "lmsys-0.8", "lmsys-1.1")
NOTE_LOADS = ("normal-0.5", "normal-1.1", "lmsys-1.1", "lmsys-conv", "conv-2")
BASELINES = ("best-fit", "worst-fit", "load-balance")
MELLS = ("mell-literal", "mell", "mell-plus")
COMMON = ("cluster", "growth", "index", "policy", "scheduler", "state", "waiting", "bounds")


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


def main() -> None:
    """Compute what is missing, print the tables, write and plot what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=pathlib.Path, help="the folder of traces and lengths")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", action="append", help="names of tables (default: all)")
    parser.add_argument("--warm", metavar="P[,P...]", help="only compute these policies' cells; no tables")
    parser.add_argument("--adopt", action="store_true", help="keep a policy's older cells if a probe agrees with them")
    parser.add_argument("--write", type=pathlib.Path, help="a Markdown file whose tables are replaced")
    parser.add_argument("--plot", type=pathlib.Path, help="a folder for the figures")
    arguments = parser.parse_args()
    wanted = {name: table for name, table in TABLES.items() if not arguments.only or name in arguments.only}
    cells = {cell for table in wanted.values() for cell in table.cells(range(arguments.seeds))}
    if arguments.warm:
        cells = {cell for cell in cells if cell.policy in arguments.warm.split(",")}
    if arguments.adopt:
        for policy in sorted({cell.policy for cell in cells}):
            adopt(policy, arguments.traces)
    for cell in cells:
        source_of(cell.policy)
    results = compute(sorted(cells, key=msgspec.structs.astuple), arguments.traces, arguments.processes)
    if arguments.warm:
        return
    for name, table in wanted.items():
        text = table.text(results, range(arguments.seeds))
        print(f"\n{name}\n\n{text}")
        if arguments.write:
            replace(arguments.write, name, text)
    if arguments.plot:
        plot(arguments.plot, results, range(arguments.seeds))


# ---- cells


def compute(cells: Sequence[Cell], traces: pathlib.Path, processes: int) -> dict[Cell, Result]:
    """All results, from files where they are fresh."""
    OUT.mkdir(parents=True, exist_ok=True)
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
    return path_of(cell).with_name(path_of(cell).name.replace(source_of(cell.policy), source))


def simulate(cell: Cell, traces: pathlib.Path) -> Result:
    """Run one cell and keep its result."""
    model, card = (MODELS[MACHINES[cell.machines][0]], CARDS[MACHINES[cell.machines][1]])
    settings = SimulatorSettings(
        capacity_bytes=kv_capacity_bytes(model, card),
        bytes_per_token=model.bytes_per_token,
        latency=profile_for(model, card),
        epoch_s=cell.epoch_s,
        paper_slots=cell.link_gib_s == 0.0,
        link=LinkSettings(cell.link_gib_s * GIB) if cell.link_gib_s else None,
        seed=cell.seed,
    )
    outcome = run_policy(cell.policy, settings, load_of(cell, traces), SchedulerChoices())
    result = Result(outcome.report, outcome.samples if cell.seed == 0 else None)
    path = path_of(cell)
    path.with_suffix(".part").write_bytes(msgspec.json.encode(result))
    path.with_suffix(".part").rename(path)
    return result


def load_of(cell: Cell, traces: pathlib.Path) -> Workload:
    """The cell's load: as `melld simulate` would make it from the same seed."""
    chance = random.Random(cell.seed)
    lengths = traces / "lengths_lmsys_chat_1m.csv.gz"
    conversation = traces / "azure2023_conv.csv.gz"
    kind, _, rate = cell.load.partition("-")
    if cell.load in ("conv", "code"):
        return workloads.read_trace(traces / f"azure2023_{kind}.csv.gz").thinned(0.8, chance)
    if cell.load == "conv-2":
        return workloads.read_trace(conversation).thinned(0.8, chance).stretched(2.0).until(HOUR_S)
    if cell.load == "lmsys-conv":
        arrivals = workloads.read_trace(conversation).thinned(0.8, chance).stretched(1.1)
        return arrivals.with_lengths(workloads.read_lengths(lengths), chance).until(HOUR_S).scaled(10)
    drawn = workloads.LogNormal() if kind == "normal" else workloads.read_lengths(lengths)
    return workloads.poisson(float(rate), HOUR_S, drawn, chance).scaled(10)


def path_of(cell: Cell) -> pathlib.Path:
    """Where the cell's result is kept: the name says what it is and which source made it."""
    link = f"-{cell.link_gib_s:g}GiB" if cell.link_gib_s else ""
    name = f"{cell.machines}-{cell.load}-{cell.policy}{link}-e{cell.epoch_s:g}-s{cell.seed}-{source_of(cell.policy)}"
    return OUT / f"{name}.json"


@functools.cache
def source_of(policy: str) -> str:
    """A hash of the source files that the policy's figures depend on.

    Read once, before the processes part: what runs is what was imported then, whatever is written meanwhile.
    """
    package = ROOT / "melld"
    files = [path for path in (package / "simulator").glob("*.py") if path.stem != "plots"]
    files += [package / "simulator" / "data" / "latency.csv"]
    files += [package / "scheduler" / f"{stem}.py" for stem in COMMON]
    if policy.startswith("mell-plus"):
        others = {*COMMON, "fit", "balance", "policies", "__init__"}
        files += [path for path in (package / "scheduler").glob("*.py") if path.stem not in others]
    elif policy.startswith("mell"):
        files += list((package / "scheduler" / "mell").glob("*.py"))
    else:
        files += [package / "scheduler" / "fit.py", package / "scheduler" / "balance.py"]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


# ---- tables


class Table:
    """Rows of cells; `show` makes a text of one cell's reports over the seeds."""

    def __init__(
        self, rows: Sequence[tuple[str, dict[str, object]]], policies: Sequence[str], show: Callable[..., str]
    ) -> None:
        self.rows = rows
        self.policies = [policy for policy in policies if policy in POLICIES]
        self.show = show

    def cells(self, seeds: Iterable[int]) -> list[Cell]:
        """All cells of the table."""
        return [Cell(policy=p, seed=s, **rest) for _, rest in self.rows for p in self.policies for s in seeds]  # type: ignore[arg-type]

    def text(self, results: dict[Cell, Result], seeds: Iterable[int]) -> str:
        """The table in Markdown."""
        lines = ["| load | " + " | ".join(self.policies) + " |", "|---" * (len(self.policies) + 1) + "|"]
        for label, rest in self.rows:
            shown = []
            for policy in self.policies:
                reports = [results[Cell(policy=policy, seed=seed, **rest)].report for seed in seeds]  # type: ignore[arg-type]
                shown.append(self.show(reports))
            lines.append(f"| {label} | " + " | ".join(shown) + " |")
        return "\n".join(lines)


def mean(reports: Sequence[Report], field: str) -> float:
    """The mean of one field over the seeds."""
    return statistics.mean(getattr(report, field) for report in reports)


def ratio_and_moves(reports: Sequence[Report]) -> str:
    """Ratio ± spread over seeds / migrations per request (preemptions per request, where there are any)."""
    ratios = [report.ratio for report in reports]
    spread = (max(ratios) - min(ratios)) / 2
    text = f"{statistics.mean(ratios):.3f} ± {spread:.3f} / {mean(reports, 'migrations_per_request'):.2f}"
    preemptions = mean(reports, "preemptions_per_request")
    return text + (f" ({preemptions:.3f})" if preemptions else "")


def gpus(reports: Sequence[Report]) -> str:
    """Mean GPUs, peak GPUs, and how far the peak is above the bound's peak."""
    over = statistics.mean(report.peak_gpus - report.peak_bound for report in reports)
    return f"{mean(reports, 'mean_gpus'):.2f} / {mean(reports, 'peak_gpus'):.1f} ({over:+.1f})"


def side_effects(reports: Sequence[Report]) -> str:
    """Utilisation; activations per hour; median time between tokens; p99 time to first token."""
    return (
        f"{100 * mean(reports, 'utilisation'):.1f} % / {mean(reports, 'activations_per_h'):.0f} / "
        f"{statistics.mean(r.itl_s.p50 for r in reports) * 1e3:.0f} ms / "
        f"{statistics.mean(r.ttft_s.p99 for r in reports):.1f} s"
    )


def moves(reports: Sequence[Report]) -> str:
    """Migrations per request and per second."""
    return f"{mean(reports, 'migrations_per_request'):.2f} / {mean(reports, 'migrations_per_s'):.2f}"


def rows(machines: Sequence[str], loads: Sequence[str]) -> list[tuple[str, dict[str, object]]]:
    """One row per machine set-up and load."""
    return [(f"{one}, {LOADS[load]}", {"machines": one, "load": load}) for one in machines for load in loads]


BOTH = rows(("13B", "7B"), PAPER_LOADS)
NOTE = [*rows(("13B",), NOTE_LOADS), *rows(("7B",), ("lmsys-1.1",))]
FLIGHT = [
    (f"13B, {LOADS['lmsys-1.1']}, {rate:g} GiB/s", {"machines": "13B", "load": "lmsys-1.1", "link_gib_s": rate})
    for rate in (4.0, 1.0)
]
TABLES = {
    "table:paper": Table(BOTH, (*BASELINES, *MELLS), ratio_and_moves),
    "table:gpus": Table(BOTH, (*BASELINES, *MELLS), gpus),
    "table:effects": Table(BOTH, (*BASELINES, *MELLS), side_effects),
    "table:note": Table(NOTE, (*BASELINES, "load-balance-eager", *MELLS), ratio_and_moves),
    "table:settings": Table(
        rows(("13B",), ("lmsys-1.1",)), ("mell-plus-lean", "mell-plus", "mell-plus-tight"), ratio_and_moves
    ),
    "table:flight": Table(FLIGHT, ("load-balance", *MELLS), ratio_and_moves),
    "table:batching": Table(
        rows(("13B",), ("lmsys-0.5", "lmsys-0.8", "lmsys-1.1")),
        ("mell-literal", "mell-literal-unbatched", "mell", "mell-unbatched"),
        moves,
    ),
}


# ---- writing and drawing


def replace(path: pathlib.Path, name: str, text: str) -> None:
    """Put the table where its name stands in the file."""
    pattern = re.compile(rf"<!-- {re.escape(name)} -->.*?<!-- end -->", re.DOTALL)
    page = path.read_text(encoding="utf-8")
    if not pattern.search(page):
        sys.exit(f"{path} has no place for {name}")
    path.write_text(pattern.sub(lambda _: f"<!-- {name} -->\n{text}\n<!-- end -->", page), encoding="utf-8")


def plot(folder: pathlib.Path, results: dict[Cell, Result], seeds: Sequence[int]) -> None:
    """The paper's figures, of the 13B machines."""
    chosen = [policy for policy in (*BASELINES, *MELLS) if policy in POLICIES]

    def reports(load: str, policy: str) -> list[Report]:
        cells = (Cell("13B", load, policy, seed) for seed in seeds)
        return [results[cell].report for cell in cells if cell in results]

    groups = {
        LOADS[load].replace(", ", "\n").replace("conversation", "conv."): {p: reports(load, p) for p in chosen}
        for load in PAPER_LOADS
    }
    paths = draw_groups(folder, groups)
    pairs = {
        LOADS[load].partition(", ")[2]: {
            policy: (reports(load, policy), reports(load, f"{policy}-unbatched"))
            for policy in ("mell-literal", "mell")
            if reports(load, f"{policy}-unbatched")
        }
        for load in ("lmsys-0.5", "lmsys-0.8", "lmsys-1.1")
    }
    if all(pairs.values()):
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
