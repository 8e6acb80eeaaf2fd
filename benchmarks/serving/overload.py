"""Goodput under overload: how many requests are answered in time when twice or four times too many come.

    python -m benchmarks.serving.overload [--seconds 16] [--rounds 8] [--output FILE.json]

A real daemon on two CPU workers.  The saturating rate is what it answers when there is always enough to do (closed
loop), before each round.  Then requests come at 1, 2 and 4 times that rate, at random (Poisson, seeded), whether or not
the earlier ones have been answered (open loop), and do not come again when they are refused.  Goodput is the answers
that were whole within the objective, per second of the window without its first quarter, in which the line fills; what
ends after the window, when nobody comes any more, does not count.  The daemon's queue deadline is chosen for that.

The speed of a machine that is shared drifts within minutes by more than what is looked for.  So many short rounds go
through the loads, every other one in the opposite order, and a load's goodput is its mean over the rounds, as a ratio
of the best load's mean.  How far chance reaches is told twice: by the rate itself, which is played twice in each round,
and by the ratio in rounds drawn at random from those played (the middle 90 % of a bootstrap).
The client shares the processors with the workers: it sends bytes that were made before the window.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness import parser_of, record, rows_in_markdown
from benchmarks.serving.plain_client import Answer, PlainClient
from melld.demo_model import make_demo_model
from tests.serve.daemon_process import DaemonProcess

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 96
OBJECTIVE_S, QUEUE_DEADLINE_S = 10.0, 3.0
SEQUENCES = 16
LOADS = {"1 x": 1.0, "2 x": 2.0, "4 x": 4.0, "1 x, again": 1.0}
DRAWS = 2000
PATIENCE_S = 120.0


class Callers:
    """Requests to one daemon, and what became of each."""

    def __init__(self, client: PlainClient, seed: int) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.took_s: list[float] = []
        self.good_s: list[float] = []  # when answers in time had come
        self._client = client
        self._chance = random.Random(seed)
        self._under_way = 0
        self._idle = asyncio.Event()

    def request(self) -> bytes:
        """Return the bytes of one request, with a prompt that nobody else has."""
        body: dict[str, Any] = {"model": "demo", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
        body["prompt"] = [self._chance.randrange(5, 200) for _ in range(PROMPT_TOKENS)]
        return self._client.post("/v1/completions", json.dumps(body).encode())

    def plan(self, rate_per_s: float, seconds: float) -> list[tuple[float, bytes]]:
        """Return the requests of a window and their times, made before it begins: the workers need the processors."""
        planned = []
        at_s = 0.0
        while (at_s := at_s + self._chance.expovariate(rate_per_s)) < seconds:
            planned.append((at_s, self.request()))
        return planned

    async def closed(self, clients: int, seconds: float) -> float:
        """Return the answers per second of clients that ask again at once, without the first and last of them."""
        ends_s: list[float] = []
        end_s = time.monotonic() + seconds

        def again() -> None:
            ends_s.append(time.monotonic())
            if ends_s[-1] < end_s:
                self._ask(self.request(), again)

        for _ in range(clients):
            self._ask(self.request(), again)
        await self._all_answered()
        inside = sorted(ends_s)[clients // 2 : -clients // 2]
        return (len(inside) - 1) / (inside[-1] - inside[0])

    async def open(self, planned: list[tuple[float, bytes]], seconds: float) -> float:
        """Return the answers in time per second to clients that come at their times, once the line has filled."""
        began_s = time.monotonic()
        for at_s, request in planned:
            if (early_s := began_s + at_s - time.monotonic()) > 0:
                await asyncio.sleep(early_s)
            self._ask(request)
        await self._all_answered()
        return sum(seconds / 4 <= at_s - began_s < seconds for at_s in self.good_s) / (seconds * 3 / 4)

    def _ask(self, request: bytes, then: Callable[[], None] = lambda: None) -> None:
        """Send one request; `then` is called when it has ended."""
        began_s = time.monotonic()

        def answered(answer: Answer) -> None:
            self._count(answer, began_s)
            then()
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

        self._under_way += 1
        self._idle.clear()
        self._client.ask(request, answered)

    def _count(self, answer: Answer, began_s: float) -> None:
        """By its status; as late beyond the objective, as not whole where bytes or tokens of it are missing."""
        ended_s = time.monotonic()
        if not answer.status or (answer.status == 200 and tokens_in(answer) != OUTPUT_TOKENS):
            self.ends["not whole"] += 1
        elif answer.status != 200:
            self.ends[str(answer.status)] += 1
        else:
            self.took_s.append(ended_s - began_s)
            in_time = self.took_s[-1] <= OBJECTIVE_S
            self.ends["in time" if in_time else "late"] += 1
            if in_time:
                self.good_s.append(ended_s)

    async def _all_answered(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._idle.wait()


def tokens_in(answer: Answer) -> int:
    """Return the tokens of an answer, as the daemon counts them."""
    tokens: int = json.loads(answer.body)["usage"]["completion_tokens"]
    return tokens


class Processors:
    """The seconds of processor that each party uses: who pays for an overload.

    Whatever else runs on the machine, or takes the machine itself away from its guest, is told as `others`: a window
    in which they took much says little.
    """

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon.process.pid
        self._workers = [worker["pid"] for worker in daemon.status()["workers"]]
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        used = {"workers": sum(map(seconds_of, self._workers)), "daemon": seconds_of(self._daemon)}
        used["client"] = own.ru_utime + own.ru_stime
        return used | {"others": seconds_of_all() - sum(used.values())}

    def since(self) -> dict[str, float]:
        """Since this was made."""
        return {name: round(used - self._before[name], 2) for name, used in self._now().items()}


def seconds_of(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds_of_all() -> float:
    """Return the time in which the processors were not idle: user, nice, system, interrupts, stolen by the host."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, _idle, _iowait, *others = map(int, first.split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


async def measure(daemon: DaemonProcess, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the saturating rate, and the goodput at multiples of it, in turns: upwards, downwards, upwards, ..."""
    client = PlainClient(daemon.url)
    await Callers(client, 0).closed(4 * SEQUENCES, 5.0)  # a warm-up
    rows = []
    for turn in range(asked.rounds):
        saturating = await Callers(client, turn).closed(4 * SEQUENCES, asked.seconds / 2)
        print(f"saturating: {saturating:.2f} requests/s ({saturating * OUTPUT_TOKENS:.0f} tokens/s)", flush=True)
        for name in reversed(LOADS) if turn % 2 else LOADS:
            load = Callers(client, 100 * turn + list(LOADS).index(name))
            planned = load.plan(LOADS[name] * saturating, asked.seconds)
            processors = Processors(daemon)
            goodput = await load.open(planned, asked.seconds)
            took_s = sorted(load.took_s)
            row = {"round": turn, "saturating": saturating, "load": name, "goodput": goodput}
            row |= {
                "processor_s": processors.since(),
                "ends": dict(load.ends),
                "median_s": took_s[len(took_s) // 2],
                "longest_s": took_s[-1],
            }
            rows.append(row)
            print(f"  {name}: {goodput:.2f} in time/s, {row}", flush=True)
    return rows


def of_peak(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """Return each load's mean goodput by the best load's, and the middle 90 % of it in rounds drawn at random.

    The best load is the one of all rounds in every draw: the greatest of each draw would be great by chance.
    """
    goodput = {name: [row["goodput"] for row in rows if row["load"] == name] for name in LOADS}
    best = max(goodput, key=lambda name: sum(goodput[name]))
    rounds = range(len(goodput[best]))
    chance = random.Random(1)
    draws = [chance.choices(rounds, k=len(rounds)) for _ in range(DRAWS)]

    def ratio(name: str, drawn: Sequence[int]) -> float:
        return sum(goodput[name][turn] for turn in drawn) / sum(goodput[best][turn] for turn in drawn)

    found = {}
    for name in LOADS:
        drawn = sorted(ratio(name, draw) for draw in draws)
        found[name] = (ratio(name, rounds), drawn[DRAWS // 20], drawn[-DRAWS // 20])
    return found


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=16.0, help="the length of each window")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--queued", type=int, default=4 * SEQUENCES, help="[server] max_queued_requests")
    asked = parser.parse_args()
    flags = ["--device", "cpu:2", "--kv-bytes", "64MiB", "--set", f"model.vllm.max_num_seqs={SEQUENCES}"]
    flags += ["--set", f"server.max_queued_requests={asked.queued}", "--set", 'scheduler.policy="most-free"']
    flags += ["--set", f"server.queue_deadline_s={QUEUE_DEADLINE_S}", "--set", "idle.sleep_after_s=inf"]
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "demo"
        make_demo_model(model)
        with DaemonProcess(model, *flags) as daemon:
            daemon.wait_ready()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                rows = runner.run(measure(daemon, asked))
    ratios = of_peak(rows)
    for name, (ratio, low, high) in ratios.items():
        print(f"{name}: {ratio:.3f} of the best load's mean goodput, 90 % of the draws within {low:.3f} to {high:.3f}")
    if asked.write:
        counted = [{key: value for key, value in row.items() if key != "ends"} | row["ends"] for row in rows]
        keys = list(dict.fromkeys(key for row in counted for key in row if key != "load"))
        table = [
            {"load": name, "of the best load": f"{ratio:.3f} ({low:.2f} to {high:.2f})"}
            | {key: f"{statistics.fmean(r.get(key, 0) for r in counted if r['load'] == name):.3g}" for key in keys}
            for name, (ratio, low, high) in ratios.items()
        ]
        record("overload", rows_in_markdown(table), "2-core VM")


if __name__ == "__main__":
    main()
