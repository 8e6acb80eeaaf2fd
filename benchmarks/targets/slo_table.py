"""GPU-seconds against attainment: every policy on real and generated load, under service targets.

    python -m benchmarks.targets.slo_table ../shared/traces --only slo --write
    python -m benchmarks.targets.slo_table ../shared/traces --only settings --only gpus --only constants

slo        GPU-seconds and attainment of each policy, beside the common bound, and which targets `mell-slo` meets
settings   `mell-slo` and others at other epochs, links and waking times, and on loads that nothing was chosen by
gpus       with 2, 4 and 8 GPUs at most
shapes     loads of shapes that no trace has, and which policies were better for less
constants  `mell-slo` with each of its constants a quarter less and more

Loads whose traces are not there are left out, with a line that says so.  Results are kept under benchmarks/out/slo.
"""

import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import msgspec

from benchmarks.harness import parser_of, record
from benchmarks.targets.slo_cells import Cell, result_of, settings_of
from benchmarks.targets.slo_loads import SHAPES, load_of
from melld.errors import ConfigError
from melld.scheduler import idle, targets
from melld.scheduler.policies.slo import constants
from melld.simulator.experiment import SchedulerChoices, run_policy
from melld.simulator.measures import Report

POLICIES = ("best-fit", "worst-fit", "load-balance", "mell-plus", "mell-slo")
PROTOTYPE_GPU_S = {
    ("conv", "8b-4090", 34): 12026, ("conv", "8b-4090", 50): 8676,
    ("conv", "13b-a100", 63): 17437, ("conv", "13b-a100", 50): 23931,
    ("conv", "13b-h100", 30): 11018, ("conv", "13b-h100", 50): 7315,
    ("code", "8b-4090", 34): 15749, ("code", "8b-4090", 50): 13237,
    ("code", "8b-h100", 30): 4298, ("code", "8b-h100", 50): 4033,
    ("conv20", "8b-h100", 30): 2251, ("conv20", "8b-h100", 50): 2169,
    ("conv20", "8b-4090", 34): 10248, ("conv20", "8b-4090", 50): 7125,
    ("arxiv", "13b-h100", 30): 6175, ("arxiv", "13b-h100", 50): 4214,
    ("lmsys", "8b-4090", 34): 5638, ("lmsys", "8b-4090", 50): 5669,
}  # fmt: skip
"""The rows, each with the GPU-seconds of the prototype that `mell-slo` is measured by."""
SHORT_ROWS = (("conv20", "8b-4090", 50), ("arxiv", "13b-h100", 30), ("lmsys", "8b-4090", 50))
OTHER_ROWS = (("day", "8b-4090", 50), ("waves", "8b-h100", 30), ("normal", "8b-4090", 34))
SETTINGS: dict[str, dict[str, float]] = {
    "epochs of 0.1 s": {"epoch_s": 0.1},
    "epochs of 1 s": {"epoch_s": 1.0},
    "links of 20 GiB/s": {"link_gib_s": 20.0},
    "waking takes 2 s": {"wake_s": 2.0},
    "waking takes 30 s": {"wake_s": 30.0},
}
CONSTANTS_ROWS = (("arxiv", "13b-h100", 30), ("lmsys", "8b-4090", 50), ("waves", "8b-h100", 30))
"""Loads where prompts, memory and bursts decide how many workers serve."""
MOST_PREEMPTIONS = 3
Row = tuple[str, str, int]


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("traces", type=pathlib.Path, help="the folder of traces and lengths")
    parser.add_argument("--only", action="append", help="names of tables (default: all)")
    asked = parser.parse_args()
    tables: dict[str, Callable[[pathlib.Path], str]] = {
        "slo": slo_table,
        "slo-targets": targets_table,
        "slo-settings": settings_table,
        "slo-gpus": gpus_table,
        "slo-shapes": shapes_table,
        "slo-constants": constants_table,
    }
    wanted = {f"slo-{name}".replace("slo-slo", "slo") for name in asked.only or ()}
    for name, make in tables.items():
        if not wanted or name in wanted or (name == "slo-targets" and "slo" in wanted):
            text = make(asked.traces)
            print(f"{name}\n{text}\n", flush=True)
            if asked.write:
                record(name, text)


def cell_of(row: Row, policy: str, **settings: float) -> Cell:
    """Return the row's cell for a policy."""
    return msgspec.structs.replace(Cell(row[0], row[1], float(row[2]), policy), **settings)


def there(rows: Sequence[Row], traces: pathlib.Path) -> Iterator[Row]:
    """Yield the rows whose load can be had; say which cannot."""
    for row in rows:
        try:
            load_of(row[0], row[1], 0, traces)
        except ConfigError as error:
            print(f"left out: {name_of(row)}: {error}", file=sys.stderr)
        else:
            yield row


def name_of(row: Row) -> str:
    """Return the row's name."""
    return f"{row[0]}, {row[1]}, {row[2]} ms"


def shown(report: Report) -> str:
    """Return GPU-seconds / attainment in percent (preemptions, where there are any)."""
    assert report.attainment is not None
    text = f"{report.gpu_seconds:,.0f} / {100 * report.attainment:.1f}"
    return text + (f" ({report.preemptions})" if report.preemptions else "")


def slo_table(traces: pathlib.Path) -> str:
    """Return all rows and policies."""
    lines = [f"| load, machines, target | bound | {' | '.join(POLICIES)} |", "|---" * (len(POLICIES) + 2) + "|"]
    for row in there(list(PROTOTYPE_GPU_S), traces):
        reports = [result_of(cell_of(row, policy), traces) for policy in POLICIES]
        print(name_of(row), *map(shown, reports), sep="  ", file=sys.stderr, flush=True)
        bound = f"{reports[0].bound_gpu_seconds:,.0f}"
        lines.append(f"| {name_of(row)} | {bound} | {' | '.join(map(shown, reports))} |")
    return "\n".join(lines)


def targets_table(traces: pathlib.Path) -> str:
    """Return, row by row, what `mell-slo` was to reach and did not."""
    lines = [
        "| load, machines, target | GPU-seconds over the prototype's | goodput per GPU-second | must | stretch |",
        "|---" * 5 + "|",
    ]
    for row in there(list(PROTOTYPE_GPU_S), traces):
        found = {policy: result_of(cell_of(row, policy), traces) for policy in POLICIES}
        must, stretch = judged(row, found)
        over, goodput = (
            found["mell-slo"].gpu_seconds / PROTOTYPE_GPU_S[row],
            found["mell-slo"].goodput_per_gpu_second,
        )
        marks = ["; ".join(missed) or "met" for missed in (must, stretch)]
        lines.append(f"| {name_of(row)} | {over:.3f} | {goodput:.3f} | {marks[0]} | {marks[1]} |")
    return "\n".join(lines)


def judged(row: Row, found: dict[str, Report]) -> tuple[list[str], list[str]]:
    """Return what of the must and of the stretch is missed."""
    ours, spread = found["mell-slo"], found["worst-fit"]
    assert ours.attainment is not None
    assert ours.goodput_per_gpu_second is not None
    assert spread.attainment is not None
    must, stretch = [], []
    if row[0] == "code":
        if row == ("code", "8b-4090", 34) and ours.goodput_per_gpu_second <= 0.37:
            must.append("goodput of 0.37")
        if row == ("code", "8b-h100", 30) and not (ours.attainment >= 0.9 and ours.gpu_seconds <= 5500):
            stretch.append("90 % for 5,500")
        return must, stretch
    tight = row[2] != 50
    if ours.attainment < (0.975 if tight else 0.985):
        must.append("attainment")
    if ours.gpu_seconds > 1.03 * PROTOTYPE_GPU_S[row]:
        must.append("GPU-seconds")
    if ours.preemptions > MOST_PREEMPTIONS:
        must.append("preemptions")
    if not tight and row[1] != "13b-a100" and ours.gpu_seconds >= found["mell-plus"].gpu_seconds:
        must.append("fewer than mell-plus")
    if ours.attainment < 0.99:
        stretch.append("99 %")
    if ours.preemptions:
        stretch.append("no preemption")
    if spread.attainment >= 0.99 and ours.gpu_seconds > 1.02 * spread.gpu_seconds:
        stretch.append("within 2 % of worst-fit")
    return must, stretch


def settings_table(traces: pathlib.Path) -> str:
    """Return other settings and other loads."""
    policies = ("worst-fit", "mell-slo")
    lines = [f"| load, machines, target | setting | {' | '.join(policies)} |", "|---" * (len(policies) + 2) + "|"]
    cases = [(row, name, SETTINGS[name]) for row in SHORT_ROWS for name in SETTINGS]
    cases += [(row, "as in the table above", {}) for row in OTHER_ROWS]
    for row, name, settings in cases:
        if list(there([row], traces)):
            cells = [shown(result_of(cell_of(row, policy, **settings), traces)) for policy in policies]
            lines.append(f"| {name_of(row)} | {name} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def gpus_table(traces: pathlib.Path) -> str:
    """Return goodput per second of the load, and attainment, on a workstation."""
    policies = ("best-fit", "worst-fit", "mell-plus", "mell-slo")
    lines = [f"| load, machines, target | GPUs | {' | '.join(policies)} |", "|---" * (len(policies) + 2) + "|"]
    for row in there((("conv20", "8b-4090", 50), ("lmsys", "8b-4090", 50)), traces):
        for gpus in (2, 4, 8):
            cells = []
            for policy in policies:
                report = result_of(cell_of(row, policy, gpus=gpus), traces)
                assert report.attainment is not None
                assert report.goodput_per_gpu_second is not None
                good = report.goodput_per_gpu_second * report.gpu_seconds / report.requests
                cells.append(f"{report.gpu_seconds:,.0f} / {100 * good:.1f}")
            lines.append(f"| {name_of(row)} | {gpus} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def shapes_table(traces: pathlib.Path) -> str:
    """Return loads of other shapes, and the policies that serve more requests in time for fewer GPU-seconds."""
    policies = ("most-free", *POLICIES)
    lines = [f"| load, machines, target | {' | '.join(policies)} | better for less |", "|---" * 8 + "|"]
    for load in SHAPES:
        for itl_ms in (34, 50):
            row = load, "8b-4090", itl_ms
            *others, ours = (result_of(cell_of(row, policy), traces) for policy in policies)
            better = [other.policy for other in others if dominates(other, ours)]
            cells = [*map(shown, (*others, ours)), ", ".join(better) or "none"]
            lines.append(f"| {name_of(row)} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def dominates(other: Report, ours: Report) -> bool:
    """Return True if more requests were served in time for fewer GPU-seconds."""
    assert other.attainment is not None
    assert ours.attainment is not None
    return other.gpu_seconds < ours.gpu_seconds and other.attainment > ours.attainment


def constants_table(traces: pathlib.Path) -> str:
    """Return what a quarter less and more of each constant does on a few rows."""
    rows = list(there(CONSTANTS_ROWS, traces))
    usual = [result_of(cell_of(row, "mell-slo"), traces) for row in rows]
    lines = [
        f"| constant | a quarter less: GPU-seconds; attainment, {', '.join(row[0] for row in rows)} | a quarter more |",
        "|---|---|---|",
        f"| as it is | {changed(usual, usual)} | {changed(usual, usual)} |",
    ]
    for module, constant, value in chosen_numbers():
        cells = []
        for times in (0.75, 1.25):
            setattr(module, constant, type(value)(value * times))
            cells.append(changed([simulated(cell_of(row, "mell-slo"), traces) for row in rows], usual))
        setattr(module, constant, value)
        lines.append(f"| `{constant}` = {value:g} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def chosen_numbers() -> Iterator[tuple[ModuleType, str, float]]:
    """Yield the constants of `mell-slo`, and those of what it shares with other policies."""
    for module, names in ((constants, vars(constants)), (idle, ("MARGIN",)), (targets, ("LATE_TIMES",))):
        for name in list(names):
            if isinstance(value := getattr(module, name), int | float):
                yield module, name, value


def simulated(cell: Cell, traces: pathlib.Path) -> Report:
    """Simulate a cell and keep nothing."""
    load = load_of(cell.load, cell.machines, cell.seed, traces)
    return run_policy(cell.policy, settings_of(cell), load, SchedulerChoices()).report


def changed(reports: Sequence[Report], usual: Sequence[Report]) -> str:
    """Return by how much GPU-seconds change in the mean, and each row's attainment in percent."""
    ratios = [one.gpu_seconds / other.gpu_seconds for one, other in zip(reports, usual, strict=True)]
    attained = " ".join(f"{100 * (report.attainment or 0.0):.1f}" for report in reports)
    return f"{100 * (sum(ratios) / len(ratios) - 1):+.1f} %; {attained}"


if __name__ == "__main__":
    main()
