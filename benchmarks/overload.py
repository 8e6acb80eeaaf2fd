"""Goodput under overload: how many requests are answered in time when twice or four times too many come.

    PYTHONPATH=. .venv/bin/python benchmarks/overload.py [--seconds 20] [--output FILE.json]

A real daemon on two CPU workers.  The saturating rate is what it answers when there is always enough to do (closed
loop).  Then requests come at 1, 2 and 4 times that rate, at random (Poisson, seeded), whether or not the earlier ones
have been answered (open loop), and do not come again when they are refused.  Goodput is the answers that were whole
within the objective, per second of the window without its first quarter, in which the line fills; what ends after the
window, when nobody comes any more, does not count.  It is printed as a ratio of the greatest of its round.  The
daemon's queue deadline is chosen for that objective.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from melld.demo_model import make_demo_model
from tests.daemon_process import DaemonProcess

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 96
OBJECTIVE_S, QUEUE_DEADLINE_S = 10.0, 3.0
SEQUENCES = 16
LOADS = (1.0, 2.0, 4.0)


class Load:
    """Requests to one daemon, and what became of each."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.took_s: list[float] = []
        self.good_s: list[float] = []  # when answers in time had come
        self._session = session
        self._url = url
        self._chance = random.Random(seed)

    async def ask(self) -> None:
        """One request; counted by its status, and as late where the objective was missed."""
        body: dict[str, Any] = {"model": "demo", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
        body["prompt"] = [self._chance.randrange(5, 200) for _ in range(PROMPT_TOKENS)]
        began_s = time.monotonic()
        async with self._session.post(self._url + "/v1/completions", json=body) as answer:
            await answer.read()
        took_s = time.monotonic() - began_s
        in_time = answer.status == 200 and took_s <= OBJECTIVE_S
        self.ends["in time" if in_time else "late" if answer.status == 200 else str(answer.status)] += 1
        if answer.status == 200:
            self.took_s.append(took_s)
        if in_time:
            self.good_s.append(began_s + took_s)

    async def closed(self, clients: int, seconds: float) -> float:
        """As many clients that ask again at once: answers per second, without the first and the last of them."""
        ends_s: list[float] = []
        end_s = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end_s:
                await self.ask()
                ends_s.append(time.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        inside = sorted(ends_s)[clients // 2 : -clients // 2]
        return (len(inside) - 1) / (inside[-1] - inside[0])

    async def open(self, rate_per_s: float, seconds: float) -> float:
        """They come at that rate for so long: answers in time per second, once the line has filled."""
        began_s = time.monotonic()
        at_s = 0.0
        async with asyncio.TaskGroup() as group:
            while (at_s := at_s + self._chance.expovariate(rate_per_s)) < seconds:
                await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
                group.create_task(self.ask())
        return sum(seconds / 4 <= at_s - began_s < seconds for at_s in self.good_s) / (seconds * 3 / 4)


class Processors:
    """The seconds of processor that each party has used: who pays for an overload."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        workers = [worker["pid"] for worker in self._daemon.status()["workers"]]
        own = resource.getrusage(resource.RUSAGE_SELF)
        used = {"client": own.ru_utime + own.ru_stime, "daemon": seconds_of(self._daemon.process.pid)}
        return used | {"workers": sum(map(seconds_of, workers))}

    def since(self) -> dict[str, float]:
        """Since the last time it was asked."""
        before, self._before = self._before, self._now()
        return {name: round(used - before[name], 2) for name, used in self._before.items()}


def seconds_of(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(daemon: DaemonProcess, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The saturating rate, and the goodput at multiples of it, in turns."""
    url = daemon.url
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
        await Load(session, url, 0).closed(4 * SEQUENCES, 5.0)  # a warm-up
        saturating = await Load(session, url, 1).closed(4 * SEQUENCES, asked.seconds)
        print(f"saturating: {saturating:.2f} requests/s ({saturating * OUTPUT_TOKENS:.0f} tokens/s)", flush=True)
        rows = []
        processors = Processors(daemon)
        for turn in range(asked.rounds):
            for times in LOADS:
                load = Load(session, url, 100 * turn + int(times))
                goodput = await load.open(times * saturating, asked.seconds)
                took_s = sorted(load.took_s)
                row = {"round": turn, "times": times, "goodput": goodput, "of_saturating": goodput / saturating}
                row |= {
                    "processor_s": processors.since(),
                    "ends": dict(load.ends),
                    "median_s": took_s[len(took_s) // 2],
                    "longest_s": took_s[-1],
                }
                rows.append(row)
                print(f"  {times:g} x: {goodput:.2f} in time/s, {row}", flush=True)
    return [{"saturating": saturating, "objective_s": OBJECTIVE_S, "queue_deadline_s": QUEUE_DEADLINE_S}, *rows]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="the length of each window")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--queued", type=int, default=4 * SEQUENCES, help="[server] max_queued_requests")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    flags = ["--device", "cpu:2", "--kv-bytes", "64MiB", "--set", f"model.vllm.max_num_seqs={SEQUENCES}"]
    flags += ["--set", f"server.max_queued_requests={asked.queued}", "--set", 'scheduler.policy="most-free"']
    flags += ["--set", f"server.queue_deadline_s={QUEUE_DEADLINE_S}", "--set", "idle.sleep_after_s=inf"]
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "demo"
        make_demo_model(model)
        with DaemonProcess(model, *flags) as daemon:
            rows = asyncio.run(measure(daemon.wait_ready(), asked))
    for turn in range(asked.rounds):
        mine = {row["times"]: row["goodput"] for row in rows[1:] if row["round"] == turn}
        ratios = ", ".join(f"{times:g} x {goodput / max(mine.values()):.3f}" for times, goodput in mine.items())
        print(f"round {turn + 1}, of its peak: {ratios}")
    if asked.output:
        asked.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
