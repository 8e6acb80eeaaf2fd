"""The highest rate that keeps every target, with prompts and decodes on workers of their own and without; simulated.

    python -m benchmarks.targets.splitwise ../shared/traces --write benchmarks/results

Splitwise's comparison (its Figs. 16 to 18) on one GPU per worker, and on its coding and conversation loads: arrivals at
random, lengths from the Azure traces.  Kept are its nine SLOs (`slowdowns`), or `mell-slo`'s own promise
for 99 % of the requests, with a pace of so many steps of a lone request.

    mixed        every worker computes prompts and decodes: `roles = "off"`
    pools        prompt pool and token pool, fixed, with walls between them
    mixed pool   the same, but whatever has no room in its pool goes to the other: `--role`
    auto         `roles = "auto"`: splits, and merges, as the load asks for

The prompt pool is half of the workers or one more, whichever does better.  Results are kept under
benchmarks/out/splitwise.
"""

import functools
import hashlib
import pathlib
import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from benchmarks.harness import GIB, ROOT, kept, machine_settings, parser_of, record, source_of
from benchmarks.targets.slo_cells import MACHINES
from benchmarks.targets.slowdowns import Slowdowns, slowdowns
from melld.ids import WorkerId
from melld.scheduler.policies.slo.dispatch import Prompt
from melld.scheduler.policies.slo.policy import MellSlo
from melld.scheduler.reasons import Reason
from melld.scheduler.roles import Role, RoleSettings, Steps, pressure
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.state import Request, Worker
from melld.scheduler.targets import Targets
from melld.simulator import workload as workloads
from melld.simulator.experiment import SchedulerChoices, make_scheduler
from melld.simulator.links import LinkSettings
from melld.simulator.service import WARM_UP_S
from melld.simulator.settings import SimulatorSettings
from melld.simulator.simulation import Simulation
from melld.simulator.workload import Workload

OUT = ROOT / "benchmarks" / "out" / "splitwise"
MIXED, POOLS, MIXED_POOL, AUTO = "mixed", "pools", "mixed pool", "auto"
LENGTHS = {"conversation": "azure2023_conv.csv.gz", "coding": "azure2023_code.csv.gz"}
SPLITWISE, OWN = "nine SLOs", "own promise"
REQUESTS, LEAST_S = 1000, 60.0
PRECISION = 1.05
CONTEXT_TOKENS = 1000.0
MEDIAN_PACE, P90_PACE, P99_FIRST = 1.25, 1.5, 6.0
"""Of the nine SLOs: what the scheduler is given as targets, and what its arithmetic is judged by here."""


class Row(msgspec.Struct, frozen=True):
    """A load on machines.  `lone_steps`: the pace, in steps of a lone request."""

    machines: str
    gpus: int
    load: str
    kept: str = SPLITWISE
    lone_steps: float = P90_PACE
    link_gib_s: float = 20.0


ROWS = (
    Row("8b-4090", 4, "coding"),
    Row("8b-4090", 4, "conversation"),
    Row("13b-h100", 4, "coding"),
    Row("13b-h100", 4, "conversation"),
    Row("8b-4090", 4, "conversation", OWN, 2.0),
    Row("8b-4090", 4, "conversation", OWN, 3.0),
    Row("8b-4090", 2, "conversation"),
    Row("8b-4090", 8, "conversation"),
    Row("8b-4090", 4, "coding", link_gib_s=4.0),
)


class Cell(msgspec.Struct, frozen=True):
    """One simulation.  `prefilling`: the size of a fixed prompt pool."""

    row: Row
    kind: str
    rate_per_s: float
    prefilling: int = 0
    seed: int = 0


class Result(msgspec.Struct, frozen=True):
    """What came out: slow-downs, the part of the requests within the own targets, worker-seconds, moves per request."""

    slowdowns: Slowdowns
    attainment: float
    gpu_seconds: float
    moves: float

    def keeps(self, row: Row) -> bool:
        """Return True if all that the row asks for was kept."""
        return not self.slowdowns.missed if row.kept == SPLITWISE else self.attainment >= 0.99


class Walled(MellSlo):
    """`mell-slo` whose fixed pools take nothing of each other: a prompt waits for its own."""

    def _prefiller(self, request: Request, prompt: Prompt) -> Worker | None:  # noqa: ARG002
        worker = self.roles.for_prompt()
        return worker if worker is not None and self.cluster.fits(worker, request.kv_bytes) else None

    def _chosen(self, request: Request, prompt: Prompt, reason: Reason) -> Worker | None:
        waits = request.worker is None and self.roles.prefill_workers()
        return None if waits else super()._chosen(request, prompt, reason)


def lone_step_s(settings: SimulatorSettings) -> float:
    """Return a step of one request."""
    return float(settings.latency.step_s(np.ones(1), np.array([CONTEXT_TOKENS]))[0])


def settings_of(row: Row) -> SimulatorSettings:
    """Return the row's machines."""
    names = MACHINES[row.machines]
    itl_s = row.lone_steps * lone_step_s(machine_settings(*names))
    first = {"ttft_s": 0.1, "prefill_times": P99_FIRST} if row.kept == SPLITWISE else {}
    return machine_settings(
        *names,
        gpus=row.gpus,
        epoch_s=0.1,
        wake_s=0.5,
        link=LinkSettings(row.link_gib_s * GIB),
        targets=Targets(itl_s, sheds=False, **first),
    )


@functools.cache
def lengths_of(load: str, traces: pathlib.Path) -> list[workloads.Lengths]:
    """Return the trace's lengths."""
    return workloads.read_lengths(traces / LENGTHS[load])


def load_of(cell: Cell, traces: pathlib.Path) -> Workload:
    """Return arrivals at random."""
    seconds = WARM_UP_S + max(LEAST_S, REQUESTS / cell.rate_per_s)
    return workloads.poisson(cell.rate_per_s, seconds, lengths_of(cell.row.load, traces), random.Random(cell.seed))


def result_of(cell: Cell, traces: pathlib.Path) -> Result:
    """Return the cell's result, from its file if the source that made it is the present one."""

    def simulated() -> Result:
        settings = settings_of(cell.row)
        numbered = [(WorkerId(f"w{number}"), number) for number in range(cell.row.gpus)]
        fixed = {name: Role.PREFILL if number < cell.prefilling else Role.DECODE for name, number in numbered}
        roles = RoleSettings(auto=cell.kind == AUTO, fixed=fixed if cell.prefilling else {})
        scheduler = make_scheduler(MellSlo.name, settings, SchedulerChoices(retire_after_s=60.0, roles=roles))
        if cell.kind == POOLS:
            scheduler = Scheduler(Walled, scheduler.settings)
        measures = Simulation(settings, load_of(cell, traces), scheduler).run()
        report = measures.report(cell.kind)
        assert report.attainment is not None
        return Result(slowdowns(measures), report.attainment, report.gpu_seconds, report.migrations_per_request)

    name = f"{hashlib.sha256(repr(cell).encode()).hexdigest()[:16]}-{source_of(MellSlo.name)}.json"
    return kept(OUT / name, Result, simulated)


def highest_rate(keeps: Callable[[float], bool], guess: float) -> float:
    """Return the highest rate that is kept, within 5 %: from the guess outwards, then by halving."""
    low = high = guess
    if keeps(guess):
        while keeps(high := high * 1.3):
            low = high
    else:
        while not keeps(low := low / 1.3):
            high = low
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def predicted(row: Row, traces: pathlib.Path) -> tuple[float, float]:
    """Return the rates at which the arithmetic of roles has mixed workers, and the best split, at their limit."""
    settings, lengths = settings_of(row), lengths_of(row.load, traces)
    mean_prompt = float(np.mean([one.prompt_tokens for one in lengths]))
    mean_output = float(np.mean([one.output_tokens for one in lengths]))
    prefill_s = float(np.mean([settings.latency.prefill_s(one.prompt_tokens) for one in lengths]))
    target_s = (MEDIAN_PACE if row.kept == SPLITWISE else row.lone_steps) * lone_step_s(settings)

    def steps_at(decodes: float) -> Steps:
        def steps(workers: int) -> float:
            batch = np.array([decodes / workers])
            return float(settings.latency.step_s(batch, batch * (mean_prompt + mean_output / 2))[0])

        return steps

    def limit(splits: Sequence[int]) -> float:
        def keeps(rate: float) -> bool:
            load = rate * mean_output * target_s, rate * prefill_s
            return min(pressure(steps_at(load[0]), row.gpus, split, load[1], target_s) for split in splits) <= 1.0

        return highest_rate(keeps, 1.0)

    return limit([0]), limit(range(row.gpus))


def line_of(row: Row, traces: pathlib.Path) -> str:
    """Return one line of the table."""

    def highest(kind: str, sizes: Sequence[int], guess: float) -> float:
        def keeps(rate: float) -> bool:
            cells = (Cell(row, kind, round(rate, 3), size) for size in sizes)
            return any(result_of(cell, traces).keeps(row) for cell in cells)

        return highest_rate(keeps, guess)

    sizes = [size for size in (row.gpus // 2, row.gpus // 2 + 1) if size < row.gpus]
    mixed_guess, split_guess = predicted(row, traces)
    mixed = highest(MIXED, [0], mixed_guess)
    auto = highest(AUTO, [0], mixed * split_guess / mixed_guess)
    pools, mixed_pool = (highest(kind, sizes, auto) for kind in (POOLS, MIXED_POOL))
    seconds = [
        result_of(Cell(row, AUTO, round(rate, 3)), traces).gpu_seconds
        / result_of(Cell(row, MIXED, round(rate, 3)), traces).gpu_seconds
        for rate in (mixed / 2, mixed)
    ]
    pace = row.kept if row.kept == SPLITWISE else f"{row.kept}, {row.lone_steps:g} steps"
    return (
        f"| {row.machines}, {row.gpus} GPUs, {row.link_gib_s:g} GiB/s | {row.load} | {pace} "
        f"| {mixed:.2f} | {pools:.2f} | {mixed_pool:.2f} | {auto:.2f} | {auto / mixed:.2f} "
        f"| {split_guess / mixed_guess:.2f} | {seconds[0]:.3f}; {seconds[1]:.3f} |"
    )


def main() -> None:
    """Print the table, and write it where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("traces", type=pathlib.Path)
    parser.add_argument("--row", type=int, action="append", help="numbers of rows, from 0 (default: all)")
    asked = parser.parse_args()
    lines = [
        "| machines | load | kept | mixed | pools | mixed pool | auto | auto/mixed | predicted "
        "| worker-seconds, auto/mixed, at half and all of the mixed rate |",
        "|---" * 10 + "|",
    ]
    for number in asked.row or range(len(ROWS)):
        lines.append(line_of(ROWS[number], asked.traces))
        print(lines[-1], flush=True)
    if asked.write:
        record("splitwise", "\n".join(lines))


if __name__ == "__main__":
    main()
