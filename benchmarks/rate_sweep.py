"""Goodput with and without migration, from an idle fleet to one that gets three times what it can answer.

    PYTHONPATH=. python benchmarks/rate_sweep.py [--seeds 5] [--processes 2]

Simulated: the daemon's own scheduler and planner on a fixed number of GPUs (llama-2-13b on A100-40GB), moves that take
time over links of 4 GiB/s, Poisson arrivals.  Who waits longer than the deadline is sent away, as by the daemon.  A
request is good when its first token came within TTFT_S and its mean time between tokens is within ITL_S; goodput is the
tokens of good answers, and the good answers, per second of arrivals.  A rate of 1 is that at which the requests fill
all memory of the fleet, each GPU at the pace of a full one: that much could be answered if nothing were ever lost.
"""

import argparse
import concurrent.futures
import itertools
import random
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np
from cells import machine_settings

from melld.scheduler.cluster import ClusterSettings
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.simulator.experiment import horizon_s
from melld.simulator.links import GIB, LinkSettings
from melld.simulator.measures import Measures
from melld.simulator.policies import ALL_POLICIES
from melld.simulator.run import Run
from melld.simulator.settings import SimulatorSettings
from melld.simulator.simulation import Simulation
from melld.simulator.workload import LogNormal, Workload, poisson

OFF, ON = "best-fit", "mell-plus"
RATES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0)
LOADS = {"short": (1.0, 120.0), "long": (10.0, 600.0)}
"""Factor of the lengths, seconds of arrivals."""
GPUS = 4
WAIT_DEADLINE_S, TTFT_S, ITL_S = 4.0, 6.0, 0.1


class Cell(msgspec.Struct, frozen=True):
    """One simulation."""

    load: str
    rate: float
    policy: str
    seed: int


class Result(msgspec.Struct, frozen=True):
    """`good_tokens`, `good`: per second of arrivals."""

    good_tokens: float
    good: float
    moves_per_request: float
    preemptions: int


class Goodput(Measures):
    """What is counted besides: answers in time."""

    def __init__(self, settings: SimulatorSettings, load: Workload) -> None:
        super().__init__(settings, load.output_tokens)
        self._load = load
        self.good = 0
        self.good_tokens = 0

    def finished(self, run: Run, now_s: float) -> None:
        """See `Measures`."""
        super().finished(run, now_s)
        answer_tokens = self._load.output_tokens[run.index]
        itl_s = (now_s - run.first_token_s) / max(answer_tokens - 1, 1)
        if run.first_token_s - self._load.arrival_s[run.index] <= TTFT_S and itl_s <= ITL_S:
            self.good += 1
            self.good_tokens += answer_tokens


def machines(seed: int) -> SimulatorSettings:
    """Return the fleet."""
    return machine_settings(
        "llama-2-13b",
        "a100-40g",
        gpus=GPUS,
        link=LinkSettings(4 * GIB),
        seed=seed,
    )


def arrivals(cell: Cell, settings: SimulatorSettings) -> Workload:
    """Return the same for every policy."""
    factor, seconds = LOADS[cell.load]
    chance = random.Random(cell.seed)
    lengths = poisson(100.0, 50.0, LogNormal(), chance).scaled(factor).limited(settings.most_tokens)
    prompt, answer = np.array(lengths.prompt_tokens, float), np.array(lengths.output_tokens, float)
    context = ((prompt + answer / 2) * answer).sum() / answer.sum()  # of a request at a moment of its life
    holds = settings.capacity_bytes / settings.bytes_per_token
    step_s = settings.latency.step_s(np.array([holds / context]), np.array([holds]))[0]
    saturating_per_s = GPUS * holds / context / (answer.mean() * step_s)
    return (
        poisson(cell.rate * saturating_per_s, seconds, LogNormal(), chance).scaled(factor).limited(settings.most_tokens)
    )


def simulate(cell: Cell) -> Result:
    """Simulate one policy at one rate."""
    settings = machines(cell.seed)
    load = arrivals(cell, settings)
    cluster = ClusterSettings(horizon_s=horizon_s(settings), instant_moves=False)
    limits = SchedulerSettings(cluster=cluster, wait_deadline_s=WAIT_DEADLINE_S)
    simulation = Simulation(settings, load, Scheduler(ALL_POLICIES[cell.policy], limits))
    measures = simulation.measures = Goodput(settings, load)
    simulation.run()
    window_s = load.arrival_s[-1]
    moves = measures.moves / len(load)
    return Result(measures.good_tokens / window_s, measures.good / window_s, moves, measures.preemptions)


def main() -> None:
    """Compute all cells, and a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    cells = [Cell(*one) for one in itertools.product(LOADS, RATES, (OFF, ON), range(asked.seeds))]
    with concurrent.futures.ProcessPoolExecutor(asked.processes) as pool:
        results = dict(zip(cells, pool.map(simulate, cells), strict=True))
    for load in LOADS:
        print(f"\n{load}\n")
        print("| rate | good tokens/s: off, on | ratio: mean (least to most) | of good answers | moves | preemptions |")
        print("|---" * 6 + "|")
        for rate in RATES:
            off, on = ([results[Cell(load, rate, p, s)] for s in range(asked.seeds)] for p in (OFF, ON))
            print(line(rate, off, on))


def line(rate: float, off: Sequence[Result], on: Sequence[Result]) -> str:
    """Return a row of the table."""
    ratios = [b.good_tokens / a.good_tokens for a, b in zip(off, on, strict=True)]
    answers = [b.good / a.good for a, b in zip(off, on, strict=True)]
    cells = (
        f"{rate:g}",
        f"{statistics.mean(r.good_tokens for r in off):,.0f}, {statistics.mean(r.good_tokens for r in on):,.0f}",
        f"{statistics.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        f"{statistics.mean(answers):.3f} ({min(answers):.3f} to {max(answers):.3f})",
        f"{statistics.mean(r.moves_per_request for r in on):.2f}",
        f"{statistics.mean(r.preemptions for r in off):.0f}, {statistics.mean(r.preemptions for r in on):.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
