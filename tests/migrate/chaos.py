"""Random histories: requests under moves, disconnects and dying workers, each answer held against an unharmed run.

The suite plays a short history; `make chaos` (benchmarks/chaos.py) plays a long one.

Everything random comes from the seed, but for what the machine's own timing makes of it.
"""

import contextlib
import itertools
import math
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from melld.api.control_client import ControlRefused
from melld.engine.worker_faults import POINTS, SIGNALS
from tests.daemon_process import DaemonProcess
from tests.migrate.live import CASES, Answer, Operator, Stream

BODIES = 20


class History:
    """One history on one daemon.  `tally` counts what happened, `wrong` says what should not have."""

    def __init__(self, daemon: DaemonProcess, faults: Path, seed: int, harm_every_s: float) -> None:
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._daemon = daemon
        self._faults = faults
        self._chance = random.Random(seed)
        self._harm_every_s = harm_every_s
        self._operator = Operator(daemon)
        self._bodies = [self._body() for _ in range(BODIES)]
        self._expected: list[Answer] = []
        self._over = threading.Event()

    def _body(self) -> dict[str, Any]:
        body = dict(self._chance.choice([case for name, case in CASES.items() if name != "long"]))
        body["max_tokens"] = self._chance.randrange(20, 200)
        body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
        if "seed" in body:
            body["seed"] = self._chance.randrange(1000)
        return body

    def play(self, requests: int, clients: int, seconds: float = math.inf) -> None:
        """Take the answers of a quiet run first, then the history; no request begins after so many seconds of it."""
        self._expected = [Stream(self._daemon, body).result() for body in self._bodies]
        end_s = time.monotonic() + seconds
        turns = [(self._chance.randrange(BODIES), self._chance.random() < 0.1) for _ in range(requests)]
        line = itertools.takewhile(lambda _: time.monotonic() < end_s, turns)
        lock = threading.Lock()
        readers = [threading.Thread(target=self._client, args=(line, lock)) for _ in range(clients)]
        others = [threading.Thread(target=self._mover), threading.Thread(target=self._harmer)]
        for thread in [*readers, *others]:
            thread.start()
        for thread in readers:
            thread.join()
        self._over.set()
        for thread in others:
            thread.join()
        for left in self._faults.iterdir():
            left.unlink()
        self._operator.wait_ready()
        self._operator.wait_idle()

    def _client(self, line: Any, lock: threading.Lock) -> None:
        while True:
            with lock:
                turn = next(line, None)
            if turn is None:
                return
            which, leaves = turn
            stream = Stream(self._daemon, self._bodies[which])
            try:
                if leaves:
                    stream.wait_chunks(5)
                    stream.leave()
                    self.tally["left"] += 1
                    continue
                answer = stream.result()
            except AssertionError as error:
                self.wrong.append(f"hung: {error}")
                continue
            if answer == self._expected[which]:
                self.tally["exact"] += 1
            else:
                kind = "lost" if answer.error else "altered"
                self.wrong.append(f"{kind}: {self._bodies[which]}: {answer} instead of {self._expected[which]}")

    def _mover(self) -> None:
        chance = random.Random(self._chance.random())
        while not self._over.wait(0.02):
            status = self._operator.status()
            ready = [worker["worker"] for worker in status["workers"] if worker["state"] == "ready"]
            running = [one for one in status["requests"] if one["worker"] is not None]
            if not running or len(ready) < 2:
                continue
            one = chance.choice(running)
            there = chance.choice([worker for worker in ready if worker != one["worker"]])
            try:
                report = self._operator.migrate(one["request"], there, chance.choice(["kv", "tokens", None]))
                self.tally[f"move {report['outcome']}"] += 1
            except ControlRefused as refused:
                self.tally[f"move not begun: {refused.reason.code}"] += 1

    def _harmer(self) -> None:
        """Now and then, when all workers are well: one dies, or stops, somewhere in a migration or anywhere."""
        chance = random.Random(self._chance.random())
        while not self._over.wait(self._harm_every_s):
            workers = self._operator.status()["workers"]
            if any(worker["state"] != "ready" for worker in workers) or list(self._faults.iterdir()):
                continue
            victim = chance.choice(workers)
            name = "STOP" if chance.random() < 0.15 else "KILL"
            if chance.random() < 0.2:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim["pid"], SIGNALS[name])
                self.tally[f"{name} anywhere"] += 1
            else:
                point = chance.choice([point for point in POINTS if point not in ("step", "resumed")])
                (self._faults / f"{victim['worker']}.{point}.{name}").touch()
                self.tally[f"{name} at {point}"] += 1


def orphans(pids: list[int]) -> list[int]:
    """Which of these processes are still there after ten seconds."""
    end_s = time.monotonic() + 10.0
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end_s:
        time.sleep(0.1)  # processes of another process: there is nothing to wait on
    return left
