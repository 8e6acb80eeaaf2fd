"""What priorities give the urgent and cost the others, on real workers.

A daemon with two vLLM workers whose steps last 30 ms, 2 ms for each request that decodes and 0.25 ms for each prompt
token, asleep for what the processor needs less.  Bursts, a tenth of the requests urgent, each load played twice in
turns: with their priority told, and not.  Ratios, told by not, over all rounds, and the least and most of one round.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.harness import SMALL, markdown, paced_environment, parser_of, record
from benchmarks.targets.live_load import Played, play
from melld.simulator.workload import LogNormal, Workload, gamma
from tests.migrate.live import Operator
from tests.serve.daemon_process import DaemonProcess

LENGTHS = LogNormal(200.0, 0.8, 80.0, 0.6)
HIGH_PART = 0.1
WARM_UP_S = 30.0
Rounds = list[tuple[dict[int, list[Played]], dict[int, list[Played]]]]
"""What was seen with priorities told, and without, by class."""


def p99_ttft(played: list[Played]) -> float:
    """Return the 99th percentile of the time until the first token."""
    return sorted(one.ttft_s for one in played)[int(0.99 * len(played))]


def mean_itl(played: list[Played]) -> float:
    """Return the mean over requests of the mean time between their tokens."""
    return statistics.fmean(statistics.fmean(one.gaps_s) for one in played if one.gaps_s)


def mean_latency(played: list[Played]) -> float:
    """Return the mean time from the question to the last token."""
    return statistics.fmean(one.arrivals_s[-1] - one.asked_s for one in played)


MEASURES: dict[str, tuple[int, Callable[[list[Played]], float]]] = {
    "high: p99 of the first token": (-1, p99_ttft),
    "high: mean time between tokens": (-1, mean_itl),
    "normal: mean latency": (0, mean_latency),
}


def by_class(daemon: DaemonProcess, load: Workload, seed: int, *, tells: bool) -> dict[int, list[Played]]:
    """Play the load; return what the clients of each class saw.  Another seed makes prompts that no cache knows."""
    told = load if tells else msgspec.structs.replace(load, priority=[])
    played = asyncio.run(play(daemon.url, told, seed))
    assert all(one.whole for one in played), [one.error for one in played if not one.whole][:3]
    Operator(daemon).wait_idle()
    found: dict[int, list[Played]] = {-1: [], 0: []}
    for one, priority in zip(played, load.priority, strict=True):
        found[priority].append(one)
    return found


def main() -> int:
    """Play in turns; print the ratios."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=100.0, help="of one load")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--variation", type=float, default=4.0, help="of the times between arrivals")
    asked = parser.parse_args()
    rounds: Rounds = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        SMALL.make_model(model)
        environment = paced_environment(Path(scratch) / "paced", 0.03, 0.002, 0.00025)
        flags = (*SMALL.serve_flags(2), "--set", 'scheduler.policy="mell-slo"', "--set", "targets.itl_ms=60")
        with DaemonProcess(model, *flags, environment=environment, genuine=True) as daemon:
            daemon.wait_ready()
            chance = random.Random("warm-up")
            by_class(daemon, load_of(asked, WARM_UP_S, chance), -1, tells=False)  # learns what steps and prompts take
            for number in range(asked.rounds):
                load = load_of(asked, asked.seconds, random.Random(f"{asked.variation} {number}"))
                order = (True, False) if number % 2 else (False, True)
                found = {tells: by_class(daemon, load, 2 * number + tells, tells=tells) for tells in order}
                rounds.append((found[True], found[False]))
                print(number, {name: ratio(rounds[-1:], name) for name in MEASURES}, flush=True)
    columns = ["measure", "told", "not told", "told / not told", "least to most of a round", "requests"]
    table = markdown(columns, (row(rounds, name) for name in MEASURES))
    print(table)
    if asked.write:
        record("priorities-live", table, "two CPU cores, paced")
    return 0


def load_of(asked: argparse.Namespace, seconds: float, chance: random.Random) -> Workload:
    """Return a load of that length."""
    return gamma(asked.rate, asked.variation, seconds, LENGTHS, chance).with_high(HIGH_PART, chance)


def pooled(rounds: Rounds, name: str) -> tuple[float, float, int]:
    """Return a measure over all these rounds, told and not, and of how many requests."""
    which, figure = MEASURES[name]
    told = [one for found, _ in rounds for one in found[which]]
    return figure(told), figure([one for _, found in rounds for one in found[which]]), len(told)


def ratio(rounds: Rounds, name: str) -> float:
    """Return the measure with priorities told by that without."""
    told, silent, _ = pooled(rounds, name)
    return round(told / silent, 3)


def row(rounds: Rounds, name: str) -> list[str]:
    """Return the row of one measure."""
    told, silent, count = pooled(rounds, name)
    each = [ratio([one], name) for one in rounds]
    spread = f"{min(each):.2f} to {max(each):.2f}"
    return [name, f"{told:.3f} s", f"{silent:.3f} s", f"{told / silent:.2f}", spread, f"{count}"]


if __name__ == "__main__":
    sys.exit(main())
