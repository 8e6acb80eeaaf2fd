"""Three models on two CPU devices that hold two and a bit: `PYTHONPATH=. python benchmarks/several_models.py`.

`history`: clients ask all three while workers are killed (-9) at random and while they give back memory; every greedy
and seeded answer must be the one of a quiet run, every byte accounted for afterwards, and memory flat.
`switches`: the third of three models is asked, of which two fit, again and again, half of the time beside a stream of
another model; its first token against one of a model loaded beside nobody.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.soak_meters import read_all
from melld.demo_model import make_demo_model
from tests.migrate.live import Answer, Operator, Stream
from tests.serve.daemon_process import DaemonProcess

NAMES = ("chat", "coder", "writer")
WORDS = [
    "the",
    "of",
    "a",
    "worker",
    "memory",
    "block",
    "granule",
    "answer",
    "model",
    "device",
    "stream",
    "token",
    "while",
    "other",
    "every",
    "small",
]
SAMPLE_S = 5.0
FLAT_PART = 0.03
"""The median of the last third of the samples may lie so far above that of the middle one."""


def cases() -> list[dict[str, Any]]:
    """Return bodies of all kinds: short and long prompts, short and long answers, greedy and seeded."""
    chance, found = random.Random(5), []
    for number, (prompt, answer) in enumerate(((20, 40), (200, 80), (900, 60), (2400, 30), (60, 160), (1500, 120))):
        body = {"prompt": " ".join(chance.choices(WORDS, k=prompt)), "max_tokens": answer, "ignore_eos": True}
        found.append(body | {"temperature": 0})
        found.append(body | {"temperature": 0.9, "top_p": 0.95, "seed": number})
    return found


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
        self.memory: dict[str, list[int]] = {"daemon": [], "template": [], "largest worker": [], "KV": []}
        """Bytes, in the order of the samples.  How many workers there are changes with what is loaded."""
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
            time.sleep(chance.uniform(0.5, 1.5) * self.asked.kill_every_s)
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
            workers = [0]
            for one in read_all(self.daemon.process.pid, status):
                if one.role in self.memory:
                    self.memory[one.role].append(one.own_bytes)
                else:
                    workers.append(one.own_bytes)
            self.memory["largest worker"].append(max(workers))
            self.memory["KV"].append(sum(device["arena_bytes"] for device in status["devices"]))
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


def history(daemon: DaemonProcess, asked: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Play; return what happened, and what should not have."""
    played = Play(daemon, asked)
    played.learn()
    print(f"learned {len(played.quiet)} answers", flush=True)
    played.run()
    wrong = played.wrong + played.accounts()
    memory_mib = {}
    for role, samples in played.memory.items():
        third = len(samples) // 3
        early, late = (statistics.median(part) / 2**20 for part in (samples[third : 2 * third], samples[2 * third :]))
        memory_mib[role] = [round(early, 1), round(late, 1)]
        if late > early * (1 + FLAT_PART) and role != "KV":
            wrong.append(f"the memory of the {role} rose from {early:.0f} to {late:.0f} MiB")
    firsts_s = sorted(played.firsts_s)
    happened = {
        "tally": dict(sorted(played.tally.items())),
        "loads": played.metric("melld_model_loads_total"),
        "takes": played.takes(),
        "moved blocks": played.metric("melld_kv_moved_blocks_total"),
        "memory, MiB (middle third, last third)": memory_mib,
        "first token, s (median, p99)": [round(firsts_s[int(part * len(firsts_s))], 3) for part in (0.5, 0.99)],
    }
    return happened, wrong


def switches(daemon: DaemonProcess, asked: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Ask a model that is not loaded, again and again; return the times, and what was cut or altered."""
    operator, body = Operator(daemon), cases()[0]
    quiet = {name: Stream(daemon, body | {"model": name}).result() for name in NAMES}
    long = {**body, "max_tokens": 1500}
    wrong: list[str] = []

    def states() -> dict[str, str]:
        return {one["model"]: one["state"] for one in operator.status()["served"]}

    def first_token_s(name: str) -> float:
        began_s = time.monotonic()
        stream = Stream(daemon, body | {"model": name})
        if stream.result().choices != quiet[name].choices:
            wrong.append(f"{name} answered otherwise: {stream.answer}")
        return stream.arrivals_s[0] - began_s

    bare_s: list[float] = []
    for number in range(asked.switches):
        for name in NAMES:
            if states()[name] != "unloaded":
                daemon.melld("unload", name)
        bare_s.append(first_token_s(NAMES[number % len(NAMES)]))
    switched_s: list[float] = []
    beside: dict[int, Stream] = {}
    for number in range(asked.switches):
        loaded = [name for name, state in states().items() if state == "loaded"]
        for name in NAMES:
            if len(loaded) < 2 and name not in loaded:
                daemon.melld("load", name)
                loaded.append(name)
        time.sleep(asked.pause_s)  # a person reads
        if number % 2:
            beside[number] = Stream(daemon, long | {"model": loaded[0]})
            beside[number].wait_chunks(1)
        (absent,) = [name for name in NAMES if name not in loaded]
        switched_s.append(first_token_s(absent))
        if number % 2 and (answer := beside[number].result()).error is not None:
            wrong.append(f"a stream was cut: {answer.error}")
        if number % 2 and beside[number].answer.usage["completion_tokens"] != long["max_tokens"]:
            wrong.append("a stream was cut short")
    happened = {
        "bare_s": [round(one, 3) for one in bare_s],
        "switched_s": [round(one, 3) for one in switched_s],
        "medians_s": [round(statistics.median(bare_s), 3), round(statistics.median(switched_s), 3)],
    }
    return happened, wrong


def main() -> int:
    """Play; 0 when nothing went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("history", "switches"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--think-s", type=float, default=0.3)
    parser.add_argument("--kill-every-s", type=float, default=12.0)
    parser.add_argument("--memory", default="300MiB", help="what each device may hold: two models and some KV")
    parser.add_argument("--switches", type=int, default=20)
    parser.add_argument("--pause-s", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="record what happened")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        models = []
        for seed, name in enumerate(NAMES):
            make_demo_model(Path(directory) / name, seed)
            models.append(f'{{path = "{directory}/{name}", name = "{name}"}}')
        count = 2 if asked.what == "history" else 1
        config = Path(directory) / "melld.toml"
        config.write_text(
            f"models = [{', '.join(models)}]\n[health]\nsteady_after_s = 0\n"
            f'[devices]\ncpu = {{count = {count}, memory_bytes = "{asked.memory}"}}\n'
        )
        with DaemonProcess(None, "--config", str(config)) as daemon:
            daemon.wait_ready()
            print("ready", flush=True)
            happened, wrong = (history if asked.what == "history" else switches)(daemon, asked)
            ended = daemon.stop()
    happened |= {"exit code": ended, "load of the machine": round(os.getloadavg()[0], 1), "wrong": len(wrong)}
    table = "\n".join(["| what | found |", "|---|---|", *(f"| {what} | {found} |" for what, found in happened.items())])
    print(table, *wrong[:20], sep="\n")
    if asked.write:
        tables.record(tables.RESULTS, f"several-models-{asked.what}", table, "two CPU cores")
    return int(bool(wrong) or ended != 0)


if __name__ == "__main__":
    sys.exit(main())
