"""Random histories: moves, disconnects and dying workers, with each answer compared to an undisturbed run.

The suite plays a short history; `make chaos` (benchmarks/faults/chaos.py) plays a long one.

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from melld.control.client import ControlRefused
from tests.migrate.live import CALM, CASES, Answer, Operator, Stream, alike
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import POINTS, SIGNALS

BODIES = 20
AFTER = "after the first token"
UNMET_S = 5.0
"""A fault that nothing runs into for so long is taken back: another point has its turn."""


class History:
    """One history on one daemon.

    `tally` counts what happened, `wrong` says what should not have, and `back_s` has, for each kill (-9) and each
    stream that was with the killed worker, the longest pause in which the kill fell or which began in the second after
    it: what the worker had said before it died still comes.
    """

    def __init__(
        self, daemon: DaemonProcess, faults: Path, seed: int, harm_every_s: float, bodies: int = BODIES
    ) -> None:
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._daemon = daemon
        self._faults = faults
        self._chance = random.Random(seed)
        self._harm_every_s = harm_every_s
        self._operator = Operator(daemon)
        self._bodies = [self._body() for _ in range(bodies)]
        self._expected: list[Answer] = []
        self._over = threading.Event()
        self._running: set[Stream] = set()
        self._homes: dict[str, str] = {}
        self.back_s: list[float] = []
        self._orphaned: list[tuple[float, Stream]] = []
        self.spared: frozenset[str] = frozenset()
        """Workers that nothing is done to."""
        self.calm: frozenset[str] = frozenset(CALM)
        """States of workers that nothing happens to."""
        self.move_every_s = 0.02
        self.rounding = 0.0
        """By how much log-probabilities may differ: kernels round long prompts otherwise than single tokens, so that
        what is computed again from some 250 tokens on differs in the last bits."""

    def _body(self) -> dict[str, Any]:
        body = dict(self._chance.choice([case for name, case in CASES.items() if name != "long"]))
        body["max_tokens"] = self._chance.randrange(20, 200)
        body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
        if "seed" in body:
            body["seed"] = self._chance.randrange(1000)
        return body

    def _asked(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body to send for `body`; overrides must not change the answer."""
        return body

    def play(self, requests: int, clients: int, seconds: float = math.inf) -> None:
        """Take the undisturbed answers first, then play the history; no request begins after so many seconds of it.

        May be played again: the answers of the first quiet run are those to the end.
        """
        self._over.clear()
        self._expected = self._expected or [
            stream.result() for stream in [Stream(self._daemon, body) for body in self._bodies]
        ]
        end_s = time.monotonic() + seconds
        turns = [(self._chance.randrange(len(self._bodies)), self._chance.random() < 0.1) for _ in range(requests)]
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
        orphaned, self._orphaned = self._orphaned, []
        for killed_s, stream in orphaned:
            self.back_s += pause_after(killed_s, stream.arrivals_s)
        for left in self._faults.iterdir():
            left.unlink()
        self._operator.wait(lambda status: all(worker["state"] in self.calm for worker in status["workers"]))
        self._operator.wait_idle()

    def _client(self, line: Any, lock: threading.Lock) -> None:
        while True:
            with lock:
                turn = next(line, None)
            if turn is None:
                return
            which, leaves = turn
            stream = Stream(self._daemon, self._asked(self._bodies[which]))
            if not leaves and "n" not in self._bodies[which]:
                self._running.add(stream)
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
            finally:
                self._running.discard(stream)
            expected = self._expected[which]
            if answer == expected:
                self.tally["exact"] += 1
            elif alike(asdict(answer), asdict(expected), self.rounding):
                self.tally["rounded"] += 1
            else:
                kind = "lost" if answer.error else "altered"
                self.wrong.append(f"{kind}: {self._bodies[which]}: {answer} instead of {expected}")

    def _mover(self) -> None:
        chance = random.Random(self._chance.random())
        while not self._over.wait(self.move_every_s):
            status = self._operator.status()
            ready = {worker["worker"]: worker["model"] for worker in status["workers"] if worker["state"] == "ready"}
            others = {
                one["request"]: there
                for one in status["requests"]
                if (home := one["worker"]) in ready
                and (there := [name for name, model in ready.items() if name != home and model == ready[home]])
            }
            if not others:
                continue
            request, there = chance.choice(list(others.items()))
            try:
                way = chance.choice(["kv", "tokens", None, AFTER])
                via, after = (None, True) if way == AFTER else (way, False)
                report = self._operator.migrate(request, chance.choice(there), via, after_first_token=after)
                self.tally[f"move {report['outcome']}"] += 1
            except ControlRefused as refused:
                self.tally[f"move not begun: {refused.reason.code}"] += 1

    def _harmer(self) -> None:
        """Now and then, when all workers are well, kill or stop one, somewhere in a migration or anywhere."""
        chance = random.Random(self._chance.random())
        points = [point for point in POINTS if point not in ("step", "resumed", "following", "followed")]
        while not self._over.wait(self._harm_every_s):
            workers = self._look()
            ready = [worker for worker in workers if worker["state"] == "ready"]
            victims = [worker for worker in ready if worker["worker"] not in self.spared]
            if any(worker["state"] not in self.calm for worker in workers) or len(ready) < 2 or not victims:
                continue
            victim = chance.choice(victims)
            name = "STOP" if chance.random() < 0.2 else "KILL"
            if chance.random() < 0.2:
                self._noted(victim["worker"], name, "anywhere")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim["pid"], SIGNALS[name])
            else:
                self._lay(victim["worker"], chance.choice(points), name)

    def _lay(self, worker: str, point: str, name: str) -> None:
        """Set a fault at this point until it strikes or the time is over."""
        file = self._faults / f"{worker}.{point}.{name}"
        file.touch()
        end_s = time.monotonic() + UNMET_S
        for turn in itertools.count():
            if not file.exists() or time.monotonic() > end_s or self._over.is_set():
                break
            if turn % 20 == 0:
                self._look()
            time.sleep(0.002)  # another process takes it away: there is nothing to wait on
        try:
            file.unlink()
        except FileNotFoundError:
            self._noted(worker, name, f"at {point}")

    def _look(self) -> list[Any]:
        """Note the workers, and which requests belong to whom."""
        status = self._operator.status()
        self._homes = {one["request"]: one["worker"] for one in status["requests"] if one["worker"] is not None}
        workers: list[Any] = status["workers"]
        return workers

    def _noted(self, worker: str, name: str, where: str) -> None:
        """Count a fault that happens now; for a kill, remember the streams that it cuts off."""
        self.tally[f"{name} {where}"] += 1
        if name == "KILL":
            homes, now_s = self._homes, time.monotonic()
            theirs = [request for request, home in homes.items() if home == worker]
            self._orphaned += [
                (now_s, stream)
                for stream in list(self._running)
                if stream.id and any(stream.id in request for request in theirs)
            ]


def pause_after(killed_s: float, arrivals_s: list[float]) -> list[float]:
    """Return the longest time without a chunk that began within a second after then, or before, counted from then."""
    pauses = itertools.pairwise(arrivals_s)
    found = [end_s - max(start_s, killed_s) for start_s, end_s in pauses if start_s < killed_s + 1.0]
    return [max(found)] if found and arrivals_s[-1] > killed_s else []


def orphans(pids: list[int]) -> list[int]:
    """Return those of these processes that live after ten seconds."""
    end_s = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end_s:
        time.sleep(0.1)  # processes of another process: there is nothing to wait on
    return left
