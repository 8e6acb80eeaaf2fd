"""How fast KV memory goes from model to model, and what the arena costs one alone; `PYTHONPATH=. python FILE`.

Real CPU workers on the demo model, without a daemon: this file sends what the daemon would, and reads the answers.

    lending   16 MiB are taken from a model, granted to another that has none, and its waiting request has its first
              token: the giver idle with a full prefix cache, or at work with its live blocks in the way
    steps     of 8 decoding requests, in an arena and in memory of the worker's own, in turns
"""

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import tables
from melld.demo_model import make_demo_model
from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ARGUMENTS, CPU_ENVIRONMENT
from melld.engine.fleet.arena import Arena
from melld.engine.fleet.lending import Lending
from melld.engine.fleet.process import WorkerEnded, WorkerProcess
from melld.engine.host.local import LocalHost
from melld.engine.host.template import TemplateProcess
from melld.engine.wire import messages as wire
from melld.engine.wire.spec import WorkerSpec
from melld.ids import WorkerId

MIB = 1 << 20
GRANULE_BYTES, ARENA_BYTES, LENT_BYTES = 2 * MIB, 130 * MIB, 16 * MIB
LENT = LENT_BYTES // GRANULE_BYTES
BLOCK_TOKENS, DECODES, STEP_TOKENS = 32, 8, 160
numbers = itertools.count()


class Worker:
    """A worker process, and what it has said."""

    def __init__(self, name: str, model: Path, template: TemplateProcess, arena: Arena | None) -> None:
        arguments = {**CPU_ARGUMENTS, "distributed_executor_backend": "uni", "kv_cache_memory_bytes": ARENA_BYTES}
        self.spec = WorkerSpec(
            worker=name,
            model_path=str(model),
            device_kind="cpu",
            engine_arguments=arguments,
            environment=dict(CPU_ENVIRONMENT),
            arena=arena.spec() if arena is not None else None,
        )
        self.process = WorkerProcess(self.spec, LocalHost(template), self._said, self._ended)
        self.heard: list[Any] = []
        self.on_answer: Callable[[WorkerId, wire.GranulesReturned], None] = lambda _worker, _answer: None
        self._news = asyncio.Event()
        self._chance = random.Random(name)

    def _said(self, message: Any, _payload: list[bytes]) -> None:
        if isinstance(message, wire.GranulesReturned):
            self.on_answer(WorkerId(self.spec.worker), message)
        self.heard.append(message)
        self._news.set()

    def _ended(self, ended: WorkerEnded) -> None:
        if not ended.expected:
            sys.exit(f"{ended.worker}: {ended.reason}")

    async def hear(self, wanted: Callable[[Any], bool]) -> None:
        """Return once a message like this has come since the last call."""
        while not any(map(wanted, self.heard)):
            self._news.clear()
            await self._news.wait()
        self.heard.clear()

    def ask(self, prompt_tokens: int, output_tokens: int) -> str:
        """Send a request of random tokens; return its name."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackEncoder

        name = f"request-{next(numbers)}"
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[self._chance.randrange(10, 2000) for _ in range(prompt_tokens)],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.process.send(wire.AddRequest(request=name, lease=1), MsgpackEncoder().encode(request))
        return name

    def processor_s(self) -> float:
        """Return the processor time of its engine's thread so far."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9

    async def run(self, count: int, prompt_tokens: int, output_tokens: int) -> list[wire.StepDone]:
        """Run so many requests to their end; return the reports of the steps."""
        return await self.gone({self.ask(prompt_tokens, output_tokens) for _ in range(count)})

    async def gone(self, requests: set[str]) -> list[wire.StepDone]:
        """Return the reports of the steps until these requests have ended."""
        left = set(requests)
        steps: list[wire.StepDone] = []
        while left:
            self._news.clear()
            await self._news.wait()
            said, self.heard = self.heard, []
            steps += [one for one in said if isinstance(one, wire.StepDone)]
            left.difference_update(*(one.gone for one in steps))
        return steps


class Lender:
    """Two workers in one arena; the first has what the second gets."""

    def __init__(self, giver: Worker, getter: Worker) -> None:
        self.giver, self.getter = giver, getter
        workers = {WorkerId(worker.spec.worker): worker for worker in (giver, getter)}
        self._lending = Lending(lambda worker, message: workers[worker].process.send(message))
        for worker in workers.values():
            worker.on_answer = self._returned

    def _returned(self, worker: WorkerId, returned: wire.GranulesReturned) -> None:
        self._last = returned
        self._lending.returned(worker, returned)

    def grant(self, worker: Worker, granules: tuple[int, ...]) -> None:
        """Grant these."""
        self._lending.grant(WorkerId(worker.spec.worker), granules)

    async def take(self, worker: Worker) -> wire.GranulesReturned:
        """Take what is lent in a round."""
        await self._lending.take(WorkerId(worker.spec.worker), LENT, 5.0)
        return self._last

    async def lend(self) -> tuple[float, float, int]:
        """Lend once, and give it back; return seconds until it was taken, until the token, and the blocks moved."""
        request = self.getter.ask(BLOCK_TOKENS, 1)
        await asyncio.sleep(0.05)
        self.getter.heard.clear()
        began_s = time.perf_counter()
        returned = await self.take(self.giver)
        taken_s = time.perf_counter() - began_s
        assert len(returned.granules) == LENT, returned
        self.grant(self.getter, returned.granules)
        await self.getter.hear(lambda one: isinstance(one, wire.StepDone) and request in one.gone)
        token_s = time.perf_counter() - began_s
        self.grant(self.giver, (await self.take(self.getter)).granules)
        return taken_s, token_s, returned.moved_blocks

    async def from_idle(self) -> tuple[float, float, int]:
        """Lend what an idle model's prefix cache fills."""
        await self.giver.run(8, 16 * BLOCK_TOKENS, 1)
        return await self.lend()

    async def from_busy(self) -> tuple[float, float, int]:
        """Lend from a model of whose memory a third is in use, all over."""
        requests = [self.giver.ask(8 * BLOCK_TOKENS, 2 + 190 * (number % 3 == 0)) for number in range(24)]
        await self.giver.gone({request for number, request in enumerate(requests) if number % 3})
        lent = await self.lend()
        self.giver.process.send(wire.AbortRequests(requests))
        await self.giver.gone(set(requests[::3]))
        return lent


async def step_s(worker: Worker) -> tuple[float, float]:
    """Return the time of a step in which all requests decode, the quickest tenth's, and the processor time of a step.

    The other steps say more of what else the machine did meanwhile.
    """
    began_s = worker.processor_s()
    steps = await worker.run(DECODES, 4 * BLOCK_TOKENS, STEP_TOKENS)
    decodes_s = [one.step_s for one in steps if one.decodes == DECODES and not one.prompt_tokens]
    return statistics.quantiles(decodes_s, n=10)[0], (worker.processor_s() - began_s) / len(steps)


def row(name: str, found_s: list[tuple[float, float, int]]) -> str:
    """Return a row: medians, and the longest of all."""
    taken, token = ([one[at] * 1e3 for one in found_s] for at in (0, 1))
    moved = statistics.median(one[2] for one in found_s)
    spread = f"{statistics.median(token):.0f} ms (longest {max(token):.0f})"
    return f"| {name} | {spread} | taken in {statistics.median(taken):.0f} ms, {moved:.0f} live blocks moved |"


async def measure(model: Path, rounds: int, turns: int) -> list[str]:
    """Return the rows."""
    os.environ.update(COMMON_ENVIRONMENT | CPU_ENVIRONMENT)
    template = TemplateProcess("cpu")
    arenas = [Arena(ARENA_BYTES, GRANULE_BYTES) for _ in range(2)]
    places = {"giver": arenas[0], "getter": arenas[0], "arena": arenas[1], "own": None}
    workers = {name: Worker(name, model, template, arena) for name, arena in places.items()}
    for worker in workers.values():
        await worker.hear(lambda one: isinstance(one, wire.WorkerReady))
    lender = Lender(workers["giver"], workers["getter"])
    lender.grant(workers["giver"], tuple(range(1, 1 + 2 * LENT)))
    rows = []
    for name, lend in (("idle", lender.from_idle), ("at work", lender.from_busy)):
        found = [await lend() for _ in range(rounds + 1)][1:]
        rows.append(row(f"{LENT_BYTES // MIB} MiB from a model {name} to the first token of a starved one", found))
    workers["arena"].process.send(wire.GrantGranules(tuple(range(1, ARENA_BYTES // GRANULE_BYTES))))
    ratios: list[tuple[float, ...]] = []
    for turn in range(turns + 1):
        names = ("arena", "own") if turn % 2 else ("own", "arena")
        found_s = {name: await step_s(workers[name]) for name in names}
        if turn:
            ratios.append(tuple(a / b for a, b in zip(found_s["arena"], found_s["own"], strict=True)))
            print(f"turn {turn}: {ratios[-1]}", file=sys.stderr, flush=True)
    for at, what in enumerate(("step time", "processor time of a step")):
        low, middle, high = statistics.quantiles([ratio[at] for ratio in ratios], n=4)
        spread = f"middle half {low:.3f} to {high:.3f} of {turns} turns"
        rows.append(f"| {what} in an arena / in memory of its own | {middle:.3f} | {spread} |")
    for worker in workers.values():
        worker.process.asked_to_end = True
    template.stop()
    return rows


def main() -> int:
    """Measure, print the table, and keep it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_demo_model(model)
        rows = asyncio.run(measure(model, arguments.rounds, arguments.turns))
    table = "\n".join(["| what | median | of that |", "|---|---|---|", *rows])
    print(table)
    if arguments.write:
        tables.record(tables.RESULTS, "lending", table, "two CPU cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
