"""What packing does on many machines of eight GPUs, simulated.

Llama-2-13B on A100-40G, answers of 570 tokens in the median, two requests per second and machine, 4 GiB/s between the
GPUs of a machine, 8 s to wake.  Each number of machines is run as

    one daemon     tokens between machines, KV within
    KV everywhere  as if all GPUs were in one machine
    one is lost    the first machine, half-way
    cells of N     a daemon for each N machines; each request goes to any of them, at random; no moves between

GPUs and targets are counted from 60 s on, when all have woken; times are processor time of the scheduler, on one core.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator

import msgspec
import numpy as np

from benchmarks.harness import GIB, machine_settings, markdown, parser_of, record
from melld.scheduler.events import AnyCommand, AnyEvent, EpochStarted, RequestArrived
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.scheduler.targets import Targets
from melld.simulator.experiment import ALL_POLICIES, SchedulerChoices, make_scheduler
from melld.simulator.links import LinkSettings
from melld.simulator.measures import Report
from melld.simulator.service import WARM_UP_S
from melld.simulator.settings import GPUS_PER_MACHINE, SimulatorSettings
from melld.simulator.simulation import Simulation
from melld.simulator.workload import LogNormal, Workload, poisson

RATE = 2.0
COLUMNS = (
    "machines",
    "run as",
    "GPUs awake",
    "within both targets",
    "moves per request, within a machine",
    "between",
    "preemptions per request",
    "ms per arrival",
    "p99",
    "ms per epoch",
    "lost: resumed after, median s",
)


class Timed(Scheduler):
    """A scheduler that keeps the milliseconds of its arrivals and epochs."""

    def __init__(self, policy: str, settings: SchedulerSettings) -> None:
        super().__init__(ALL_POLICIES[policy], settings)
        self.took_ms: dict[type, list[float]] = {RequestArrived: [], EpochStarted: []}

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        """See `Scheduler.handle`."""
        begun_ns = time.thread_time_ns()
        commands = super().handle(event)
        took_ms = (time.thread_time_ns() - begun_ns) / 1e6
        if isinstance(event, RequestArrived | EpochStarted):
            self.took_ms[type(event)].append(took_ms)
        return commands


class Outcome(msgspec.Struct, frozen=True):
    """A report, the mean of GPUs awake after the warm-up, and the milliseconds of each arrival and of each epoch."""

    report: Report
    gpus: float
    arrivals_ms: list[float]
    epochs_ms: list[float]


def simulated(policy: str, machines: int, load: Workload, seed: int, lost_at_s: float | None, kv: bool) -> Outcome:
    """Run the load on so many machines."""
    settings: SimulatorSettings = machine_settings(
        "llama-2-13b",
        "a100-40g",
        gpus=machines * GPUS_PER_MACHINE,
        wake_s=8.0,
        link=LinkSettings(4 * GIB, kv_between_machines=kv),
        targets=Targets(0.05),
        machine_lost_at_s=lost_at_s,
        seed=seed,
    )
    scheduler = Timed(policy, make_scheduler(policy, settings, SchedulerChoices()).settings)
    measures = Simulation(settings, load, scheduler).run()
    samples, report = measures.samples, measures.report(policy)
    counted = [
        gpus for at_s, gpus in zip(samples.at_s, samples.gpus, strict=True) if WARM_UP_S <= at_s < load.arrival_s[-1]
    ]
    return Outcome(
        report, statistics.fmean(counted), scheduler.took_ms[RequestArrived], scheduler.took_ms[EpochStarted]
    )


def divided(load: Workload, cells: int, chance: random.Random) -> Iterator[Workload]:
    """Yield each cell's part of the load."""
    cell_of = [chance.randrange(cells) for _ in range(len(load))]
    for cell in range(cells):
        kept = [index for index, one in enumerate(cell_of) if one == cell]
        columns = load.arrival_s, load.prompt_tokens, load.output_tokens
        yield Workload(*([column[index] for index in kept] for column in columns))


def row(machines: int, title: str, found: list[Outcome]) -> list[str]:
    """Return a row of the table from the runs of all cells."""
    reports = [one.report for one in found]
    requests = sum(one.requests for one in reports)
    between = sum(one.migrations_between_machines for one in reports)
    within = sum(one.migrations for one in reports) - between
    met = sum((one.attainment or 0.0) * one.requests for one in reports)
    arrivals_ms = [ms for one in found for ms in one.arrivals_ms]
    return [
        str(machines),
        title,
        f"{sum(one.gpus for one in found):.1f}",
        f"{met / requests:.1%}",
        f"{within / requests:.3f}",
        f"{between / requests:.3f}",
        f"{sum(one.preemptions for one in reports) / requests:.3f}",
        f"{statistics.fmean(arrivals_ms):.2f}",
        f"{np.percentile(arrivals_ms, 99):.2f}",
        f"{statistics.fmean(ms for one in found for ms in one.epochs_ms):.2f}",
        f"{reports[0].displaced_s.p50:.1f}" if reports[0].displaced else "-",
    ]


def main() -> int:
    """Run everything; print a row as soon as it is known."""
    parser = parser_of(__doc__)
    parser.add_argument("--machines", type=int, nargs="+", default=[2, 4, 10, 100])
    parser.add_argument("--cells", type=int, nargs="*", default=[1, 10], help="machines of a cell")
    parser.add_argument(
        "--compared", type=int, default=10, help="most machines that are run in every way; of more, no cells of one"
    )
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--policy", default="mell-slo")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rows: list[list[str]] = []

    def add(machines: int, title: str, found: list[Outcome]) -> None:
        rows.append(row(machines, title, found))
        print(" | ".join(rows[-1]), flush=True)

    for machines in asked.machines:
        chance = random.Random(f"{machines} {asked.seed}")
        load = poisson(RATE * machines, asked.seconds, LogNormal(), chance).scaled(4.0)
        run = [asked.policy, machines, load, asked.seed]
        add(machines, "one daemon", [simulated(*run, lost_at_s=None, kv=False)])
        if machines <= asked.compared:
            add(machines, "KV everywhere", [simulated(*run, lost_at_s=None, kv=True)])
            add(machines, "one is lost", [simulated(*run, lost_at_s=asked.seconds / 2, kv=False)])
        for size in asked.cells:
            if size < machines and machines % size == 0 and (machines <= asked.compared or size > 1):
                parts = divided(load, machines // size, chance)
                found = [simulated(asked.policy, size, part, asked.seed, None, kv=False) for part in parts]
                add(machines, f"cells of {size}", found)
    if asked.write:
        record("machines", markdown(COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
