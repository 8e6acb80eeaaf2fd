"""A history of three models on shared devices: clients ask all, and workers are killed (-9) whatever they do.

`several_models.py` plays it.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.faults.soak_meters import read_all, trend
from melld import demo_model
from tests.migrate.live import Answer, Operator, Stream
from tests.serve.daemon_process import DaemonProcess

NAMES = ("chat", "coder", "writer")
WORDS = ("the", "of", "a", "worker", "memory", "block", "granule", "answer", "model", "device", "stream", "token")
WIDE = 20_000
"""So wide are the hidden layers of models whose weights take more than half of a worker's memory, and so may doze."""
SAMPLE_S = 5.0
LEAST_SAMPLES = 30
"""In a third, for its median to tell anything."""
LENGTHS = ((20, 40), (100, 60), (300, 40), (800, 20), (60, 100), (500, 80))
"""Words of the prompts, and tokens of the answers."""
FLAT_PART = 0.03
"""The median of the last third of the samples may lie so far above that of the middle one."""
READY, EVERYTHING = "a worker that is ready", "all processes, with their KV"
YOUNG_S, WARM_S = 8.0, 120.0
"""Up to the first all are of one age; after the second a worker has met what it will meet."""


def cases() -> list[dict[str, Any]]:
    """Return bodies of all kinds: short and long prompts, short and long answers, greedy and seeded."""
    chance, found = random.Random(5), []
    for number, (prompt, answer) in enumerate(LENGTHS):
        body = {"prompt": " ".join(chance.choices(WORDS, k=prompt)), "max_tokens": answer, "ignore_eos": True}
        found.append(body | {"temperature": 0})
        found.append(body | {"temperature": 0.9, "top_p": 0.95, "seed": number})
    return found


def make_models(directory: Path, *, wide: bool = False, keep_alive_s: float | None = None) -> str:
    """Write the models; return their line of the configuration."""
    found = []
    sizes = {"INTERMEDIATE": WIDE, "LAYERS": 2} if wide else {"LAYERS": demo_model.LAYERS}
    for seed, name in enumerate(NAMES):
        with mock.patch.multiple(demo_model, **sizes):
            demo_model.make_demo_model(directory / name, seed)
        kept = "" if keep_alive_s is None else f", keep_alive_s = {keep_alive_s}"
        found.append(f'{{path = "{directory}/{name}", name = "{name}"{kept}}}')
    return f"models = [{', '.join(found)}]\n"


class Play:
    """One history: who asked what, what came, and what was harmed."""

    def __init__(self, daemon: DaemonProcess, asked: argparse.Namespace) -> None:
        self.daemon = daemon
        self.operator = Operator(daemon)
        self.asked = asked
        self.bodies = cases()
        self.quiet: dict[tuple[str, int], Answer] = {}
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        """Each role's processes in the order of the samples: of which age, and the bytes of each."""
        self.lives: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        """Seconds and bytes of each worker that is ready and no longer young."""
        self.together: list[tuple[str, int]] = []
        """Of each sample the workers' states, and the bytes of all processes and of all KV."""
        self.firsts_s: list[float] = []
        self._end_s = 0.0
        self._lock = threading.Lock()

    def learn(self) -> None:
        """Ask everything once, one after the other."""
        for name in NAMES:
            for number, body in enumerate(self.bodies):
                answer = Stream(self.daemon, body | {"model": name}).result()
                assert answer.error is None, answer.error
                self.quiet[name, number] = answer

    def run(self) -> None:
        """Let clients ask, harm, and measure until the time is over."""
        self._end_s = time.monotonic() + self.asked.seconds
        clients = [threading.Thread(target=self._ask, args=(number,)) for number in range(self.asked.clients)]
        others = [threading.Thread(target=self._harm), threading.Thread(target=self._measure)]
        for thread in (*clients, *others):
            thread.start()
        for thread in (*clients, *others):
            thread.join()

    def _ask(self, number: int) -> None:
        chance = random.Random(self.asked.seed * 1000 + number)
        while (left_s := self._end_s - time.monotonic()) > 0:
            favourite = int(left_s // 40) % len(NAMES)  # popularity drifts
            name = chance.choices(NAMES, [6 if index == favourite else 1 for index in range(len(NAMES))])[0]
            case = chance.randrange(len(self.bodies))
            began_s = time.monotonic()
            stream = Stream(self.daemon, self.bodies[case] | {"model": name})
            try:
                answer, problem = stream.result(), ""
            except AssertionError as error:
                answer, problem = Answer(), str(error)
            expected = self.quiet[name, case]
            if not problem and (answer.error is not None or answer.choices != expected.choices):
                problem = f"error {answer.error}" if answer.error else "another answer than in the quiet run"
            with self._lock:
                self.tally[f"{name} answered"] += 1
                self.firsts_s += [stream.arrivals_s[0] - began_s] if stream.arrivals_s else []
                if problem:
                    self.wrong.append(f"{name}, case {case}: {problem}")
            time.sleep(chance.expovariate(1 / self.asked.think_s))

    def _harm(self) -> None:
        """Kill a worker every now and then: half of the time when memory has just been asked back from one."""
        chance, kills = random.Random(self.asked.seed), 0
        while time.monotonic() < self._end_s:
            time.sleep(min(chance.uniform(0.5, 1.5) * self.asked.kill_every_s, self._end_s - time.monotonic()))
            kills += 1
            in_take = kills % 2 == 0 and self._wait_take()
            alive = [worker for worker in self.operator.status()["workers"] if worker["pid"]]
            if alive:
                victim = chance.choice(alive)
                try:
                    os.kill(victim["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.tally["killed in a take" if in_take else f"killed while {victim['state']}"] += 1

    def _wait_take(self) -> bool:
        """Wait for the next take, a while."""
        before, end_s = self.takes(), time.monotonic() + self.asked.kill_every_s
        while time.monotonic() < end_s:
            if self.takes() > before:
                return True
        return False

    def takes(self) -> float:
        """Return how often memory was asked back so far."""
        return self.metric("melld_kv_takes_total")

    def metric(self, name: str) -> float:
        """Return the sum of one of the daemon's metrics."""
        return sum(
            float(line.split()[-1]) for line in self.daemon.get("/metrics").splitlines() if line.startswith(name)
        )

    def _measure(self) -> None:
        while time.monotonic() < self._end_s:
            status = self.operator.status()
            states = {worker["worker"]: worker["state"] for worker in status["workers"]}
            arenas = sum(device["arena_bytes"] for device in status["devices"])
            readings = read_all(self.daemon.process.pid, status)
            for one in readings:
                role = f"a worker that is {states[one.role]}" if one.role in states else f"the {one.role}"
                age = f"of 2^{math.ceil(math.log2(max(one.age_s, YOUNG_S)))} s" if one.role in states else "of any age"
                self.memory[role].append((age, one.own_bytes))
                if role == READY and one.age_s > WARM_S:
                    self.lives[one.pid].append((one.at_s, float(one.own_bytes)))
            workers = ", ".join(sorted(states[one.role] for one in readings if one.role in states))
            self.together.append((workers, arenas + sum(one.own_bytes for one in readings)))
            time.sleep(SAMPLE_S)

    def accounts(self) -> list[str]:
        """Return what does not add up once nothing runs."""
        self.operator.wait_idle(60.0)
        found = []
        for device in self.operator.status()["devices"]:
            held = sum(one["granted_bytes"] + one["resident_bytes"] for one in device["models"]) + device["free_bytes"]
            granted = sum(one["granted_bytes"] for one in device["models"])
            used = sum(one["used_bytes"] for one in device["models"])
            print(device["device"], json.dumps(device))
            if used:
                found.append(f"{device['device']}: {used} bytes are in use by nobody")
            if not device["memory_bytes"] - (3 * len(NAMES) << 21) <= held <= device["memory_bytes"]:
                found.append(f"{device['device']}: {held} of {device['memory_bytes']} bytes are accounted for")
            if device["arena_bytes"] > granted + (2 << 20):
                found.append(f"{device['device']}: KV takes {device['arena_bytes']} bytes, {granted} are granted")
        return found


def risen(samples: list[tuple[str, int]]) -> tuple[int, float]:
    """Return how many samples of the last third were like one of the middle third, and how much more memory they had.

    All memory goes with how many models are loaded, and a worker's with its age: each sample has a word for that.
    """
    third = len(samples) // 3
    parts: list[defaultdict[str, list[int]]] = [defaultdict(list), defaultdict(list)]
    for place, (kind, count) in enumerate(samples[third : 3 * third]):
        parts[place // third][kind].append(count)
    early, late = parts
    both = {kind: len(late[kind]) for kind in late if kind in early}
    rises = [statistics.median(late[one]) / statistics.median(early[one]) - 1.0 for one in both]
    shared = sum(both.values())
    return shared, sum(rise * many for rise, many in zip(rises, both.values(), strict=True)) / max(shared, 1)


def history(daemon: DaemonProcess, asked: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Play; return what happened, and what should not have."""
    played = Play(daemon, asked)
    played.learn()
    print(f"learned {len(played.quiet)} answers", flush=True)
    played.run()
    wrong = played.wrong + played.accounts()
    rises = {}
    for role, samples in {**played.memory, EVERYTHING: played.together}.items():
        alike, rise = risen(samples)
        if alike >= LEAST_SAMPLES:
            level_mib = statistics.median(count for _, count in samples) / 2**20
            rises[role] = f"{level_mib:.0f} MiB, {rise:+.1%} over {alike} samples"
            if rise > FLAT_PART:
                wrong.append(f"the memory of {role} rose by {rise:.1%}")
    old = trend(played.lives.values())
    if old is not None and not old.is_flat:
        wrong.append(f"a worker's memory rises as it runs: {old}")
    firsts_s = sorted(played.firsts_s)
    happened = {
        "tally": dict(sorted(played.tally.items())),
        "loads": played.metric("melld_model_loads_total"),
        "takes": played.takes(),
        "moved blocks": played.metric("melld_kv_moved_blocks_total"),
        "memory: median, and the last third over the middle one at the same age, or beside the same workers": rises,
        "memory of a ready worker as it runs": "too short lives" if old is None else old.in_mib(),
        "first token, s (median, p99)": [round(firsts_s[int(part * len(firsts_s))], 3) for part in (0.5, 0.99)],
    }
    return happened, wrong
