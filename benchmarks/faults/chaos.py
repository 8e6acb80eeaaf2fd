"""The long random history: `make chaos`, or `python -m benchmarks.faults.chaos --requests 1000 --workers 4`.

Prints what happened, and every answer that was lost, altered or late; 0 when there is none.  With `--matrix`: a worker
killed, or stopped, at each step of a move and of a hand-over after the first token instead, one after the other
(`tests/migrate/matrix.py`).  With `--beside`: a model that pools is in the same daemon, and its workers die, too.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from benchmarks.serving.families import ROUNDING, numbers_of
from melld.demo_model import make_demo_model
from tests.families.every import FAMILIES, make_model_of
from tests.families.poolers import POOLERS
from tests.migrate.chaos import History, orphans
from tests.migrate.live import Bench, Operator, alike
from tests.migrate.matrix import HAND_OVERS, MATRIX, suffer
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

LOSSES = (*MATRIX, *HAND_OVERS)
BESIDE = "beside"


class Beside(threading.Thread):
    """The model beside, which is asked again and again; what it answered, and what it should not have."""

    def __init__(self, url: str, family: str) -> None:
        super().__init__()
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._ask = partial(numbers_of, url, family, BESIDE)
        self._expected = self._ask()
        self._over = threading.Event()

    def run(self) -> None:
        """Hold every answer against the first, which nothing disturbs."""
        while not self._over.wait(0.5):
            try:
                answer = self._ask()
            except httpx.HTTPError as error:
                self.wrong.append(f"lost by the model beside: {error!r}")
                continue
            self.tally["calls of the model beside"] += 1
            if not alike(answer, self._expected, ROUNDING):
                self.wrong.append(f"altered by the model beside: {answer} instead of {self._expected}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def history(daemon: DaemonProcess, faults: Path, asked: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Play a random history; return what happened, and what should not have."""
    played = History(daemon, faults, asked.seed, asked.harm_every_s)
    played.rounding = asked.rounding
    if asked.beside:  # of several models one that died is started again once it is needed
        played.calm |= {"failed"}
    asking: AbstractContextManager[Beside | None] = nullcontext()
    if asked.beside:
        asking = Beside(daemon.url, asked.beside)
    with asking as beside, slowed(faults) if asked.paced else nullcontext():
        played.play(asked.requests, asked.clients, asked.seconds)
    if beside:
        played.tally += beside.tally
        played.wrong += beside.wrong
    counted = [line for line in daemon.get("/metrics").splitlines() if line.startswith("melld_migrations_total")]
    back_s = sorted(played.back_s)
    if len(back_s) > 1:
        middle_s, longest_s = statistics.median(back_s), back_s[-1]
        print(f"kill to next token, {len(back_s)} times: median {middle_s:.3f} s, longest {longest_s:.3f} s")
    moves = {line.split("{")[1].split("}")[0]: float(line.split()[-1]) for line in counted}
    return {"tally": dict(sorted(played.tally.items())), "moves": moves, "back_s": back_s}, played.wrong


def too_many_deaths(lines: list[str], tally: dict[str, int]) -> list[str]:
    """Count the workers that died, and those that melld took for hung; return a complaint if nobody had harmed some."""
    stopped = sum(count for what, count in tally.items() if what.startswith("STOP "))
    harmed = stopped + sum(count for what, count in tally.items() if what.startswith("KILL "))
    hung, died = (sum(text in line for line in lines) for text in ("hung, killing it", ") exited: "))
    print(f"taken for hung {hung}, stopped {stopped}; died {died}, harmed {harmed}")
    return [f"{hung} hung, {died} dead, but {stopped} stopped, {harmed} harmed"] * (hung > stopped or died > harmed)


def matrix(daemon: DaemonProcess, faults: Path, asked: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Play every loss from the `--first`th on, while there is time; return what happened, and what should not have."""
    bench = Bench(daemon, faults)
    bench.operator.wait_linked(daemon)
    end_s = time.monotonic() + asked.seconds
    passed, wrong = [], []
    for number, loss in list(enumerate(LOSSES))[asked.first :]:
        if time.monotonic() > end_s:
            break
        began_s = time.monotonic()
        found = suffer(bench, loss)
        took_s = time.monotonic() - began_s
        print(f"{number:3d} {'wrong' if found else 'exact'} {took_s:5.1f} s  {loss.name}", flush=True)
        passed += [] if found else [loss.name]
        wrong += [f"{number} {loss.name}: {what}" for what in found]
    return {"passed": len(passed), "of": len(LOSSES)}, wrong


def main() -> int:
    """Play; 0 when nothing went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so long")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", choices=sorted(FAMILIES), help="a tiny model of this family, not the demo model")
    parser.add_argument("--beside", choices=sorted(POOLERS), help="a second model, which pools, on the same devices")
    parser.add_argument("--paced", action="store_true", help="steps last as long as those of a large model")
    parser.add_argument("--rounding", type=float, default=0.0, help="how far log-probabilities may differ")
    parser.add_argument("--policy", default="mell-plus", help="its own moves come on top")
    parser.add_argument("--harm-every-s", type=float, default=3.0)
    parser.add_argument("--matrix", action="store_true", help="every loss at every step, on two workers")
    parser.add_argument("--first", type=int, default=0, help="the number of the loss to begin the matrix with")
    parser.add_argument("--out", type=Path, help="a file for what happened, as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model, faults = Path(directory) / "model", Path(directory) / "faults"
        if asked.family is None:
            make_demo_model(model)
        else:
            make_model_of(asked.family, model)
        faults.mkdir()
        workers, policy = (2, "most-free") if asked.matrix else (asked.workers, asked.policy)
        flags = ["--set", f'scheduler.policy="{policy}"']
        flags += ["--set", "health.steady_after_s=0"]  # those that die often are used as often
        if asked.matrix:
            flags += ["--set", "migration.checksum=true", "--set", "idle.sleep_after_s=inf"]
            flags += ["--set", "model.vllm.max_num_batched_tokens=512"]  # prompts that are followed take several steps
        if asked.beside:
            make_model_of(asked.beside, Path(directory) / BESIDE)
            config = Path(directory) / "melld.toml"
            few = "vllm = {max_num_seqs = 3}"  # so that both devices are needed
            config.write_text(
                f'models = [{{path = "{model}", name = "demo", pinned = true, {few}}},\n'
                f'{{path = "{directory}/{BESIDE}", name = "{BESIDE}", pinned = true, vllm = {{runner = "pooling"}}}}]\n'
                f'[devices]\ncpu = {{count = {workers}, memory_bytes = "300MiB"}}\n'
            )
            flags += ["--config", str(config), "--set", "idle.sleep_after_s=inf"]  # both models are to have two workers
        else:
            flags += ["--device", f"cpu:{workers}", "--kv-bytes", "64MiB"]
        with DaemonProcess(
            None if asked.beside else model, *flags, environment={"MELLD_FAULTS": str(faults)}
        ) as daemon:
            daemon.wait_ready()
            print("ready", flush=True)
            began_s = time.monotonic()
            happened, wrong = (matrix if asked.matrix else history)(daemon, faults, asked)
            took_s = time.monotonic() - began_s
            pids = [worker["pid"] for worker in Operator(daemon).status()["workers"]]
            ended = daemon.stop()
    left = orphans(pids)
    if not asked.matrix:
        wrong += too_many_deaths(daemon.lines, happened["tally"])
    for kind, found in happened.items():
        print(kind, json.dumps(found) if kind != "back_s" else len(found))
    print(f"{took_s:.0f} s; exit code {ended}; orphans {left}; load {os.getloadavg()[0]:.1f}; wrong: {len(wrong)}")
    print(*wrong[:20], sep="\n")
    if asked.out:
        asked.out.write_text(json.dumps({**happened, "took_s": took_s, "exit": ended, "orphans": left, "wrong": wrong}))
    return int(bool(wrong) or ended != 0 or bool(left))


if __name__ == "__main__":
    sys.exit(main())
