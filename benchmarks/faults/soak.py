"""An hour in a daemon's life: mixed traffic, moves, kills, hangs, sleep and wake; and nothing grows, nothing is lost.

    python -m benchmarks.faults.soak [--seconds 3600] [--output FILE.json]

A real daemon with `mell-plus` on CPU workers with little KV, in rounds of busy and light traffic by turns: streams and
whole answers, n = 2, JSON schemas, regular expressions, clients that leave, long and short.  Beside the policy's moves
others are asked for, and workers are killed or stopped (SIGSTOP), anywhere or at a named step of a move; `w0` is
spared, so that one worker grows old.  After each round all is quiet: the workers fall asleep, and everything is
counted; after every --stop-every rounds their processes end, too.  Prints a verdict on each promise; exit code 1 when
one is broken.
"""

import argparse
import collections
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.faults.soak_meters import Reading
from benchmarks.faults.soak_verdicts import Quiet, Verdict, delays, verdicts
from benchmarks.harness import parser_of, record, rows_in_markdown
from melld.demo_model import make_demo_model
from melld.errors import MelldError
from tests.faults.checker import Subject
from tests.migrate.chaos import History
from tests.migrate.live import GREEDY, STORY
from tests.serve.daemon_process import DaemonProcess

SPARED = "w0"
BUSY_CLIENTS, LIGHT_CLIENTS = 12, 3
SLEEP_AFTER_S, STOP_AFTER_S = 2.0, 20.0
FALL_ASLEEP_S, END_S = 60.0, 180.0
LONG_STORY = [{"role": "user", "content": STORY[0]["content"] * 5}]
SHORT = [{"role": "user", "content": "Well?"}]
WORDS = {True: "kept  ", False: "BROKEN", None: "open  "}
MORE_REQUESTS_THAN_FIT = 10_000
"""A round's seconds end it, not its requests."""


class Mixed(History):
    """A history with long and short prompts and answers, and every third request not streamed."""

    def __init__(self, daemon: DaemonProcess, faults: Path, seed: int, harm_every_s: float) -> None:
        self._kinds = itertools.cycle(["any", "long answer", "any", "long prompt", "any", "short"])
        self._whole = itertools.cycle([False, False, True])
        self._salts = itertools.count()
        super().__init__(daemon, faults, seed, harm_every_s)
        self.spared = frozenset({SPARED})
        self.move_every_s = 0.5
        self.rounding = 1e-4

    def _body(self) -> dict[str, Any]:
        body = super()._body()
        kind = next(self._kinds)
        if kind == "long answer":
            body = {**GREEDY, "max_tokens": self._chance.randrange(400, 800)}
        elif kind == "long prompt":
            body = {**GREEDY, "messages": LONG_STORY, "max_tokens": self._chance.randrange(10, 40)}
        elif kind == "short":
            body = {**GREEDY, "messages": SHORT, "max_tokens": self._chance.randrange(1, 8)}
        body = {key: value for key, value in body.items() if key != "n"}  # its answers would share the prompt's blocks
        return {**body, "stream": False} if next(self._whole) else body

    def _asked(self, body: dict[str, Any]) -> dict[str, Any]:
        """None shares a block with another: the sizes in the decision log are then what workers really hold."""
        return {**body, "cache_salt": f"salt {next(self._salts)}"}


class Soak:
    """One run.  `quiets` has what was counted after each round, `broken_off` why there are no more."""

    def __init__(self, subject: Subject, asked: argparse.Namespace) -> None:
        self.history = Mixed(subject.daemon, subject.faults, asked.seed, asked.harm_every_s)
        self.quiets: list[Quiet] = []
        self.broken_off = ""
        self.seen: collections.Counter[str] = collections.Counter()
        self._subject = subject
        self._asked = asked

    def run(self) -> None:
        """Go round until the time is over.  The first ends with every process stopped."""
        end_s = time.monotonic() + self._asked.seconds
        try:
            for number in itertools.count():
                left_s = end_s - time.monotonic()
                if number and left_s <= 0:
                    break
                clients = LIGHT_CLIENTS if number % 3 == 2 else BUSY_CLIENTS
                before = delays(self._subject)
                self.history.play(MORE_REQUESTS_THAN_FIT, clients, min(self._asked.round_s, max(1.0, left_s)))
                self._count(number, delays(self._subject) - before)
        except (AssertionError, MelldError, OSError) as error:
            self.broken_off = f"round {number + 1}: {error}"

    def _count(self, number: int, delayed: dict[str, int]) -> None:
        """Count what there is while all is quiet."""
        resting = ("asleep", "stopped")
        self._subject.until(lambda status: all(one["state"] in resting for one in status["workers"]), FALL_ASLEEP_S)
        if number % self._asked.stop_every == 0:
            self._subject.until(lambda status: all(one["state"] == "stopped" for one in status["workers"]), END_S)
        status = self._subject.status()
        self.seen.update(worker["state"] for worker in status["workers"])
        quiet = Quiet.of(self._subject, status, dict(delayed))
        self.quiets.append(quiet)
        tally, wrong = self.history.tally, len(self.history.wrong)
        happened = f"{tally['exact']} exact, {tally['rounded']} rounded, {tally['left']} left, {wrong} wrong"
        processes = " ".join(_told(reading) for reading in sorted(quiet.readings, key=lambda one: one.role))
        print(f"{quiet.at_s - self.quiets[0].at_s:5.0f} s  {happened}  {processes}", flush=True)


def _told(reading: Reading) -> str:
    return f"{reading.role} {reading.rss_bytes / 2**20:.1f} MiB {reading.descriptors} fds;"


def main() -> int:
    """Play, judge and tell."""
    asked = parse()
    with tempfile.TemporaryDirectory() as directory:
        soak, wrong_at_end, took_s = play(Path(directory), asked)
    found = verdicts(soak.quiets, asked.warm_up_s)
    lost = soak.history.wrong + ([soak.broken_off] if soak.broken_off else [])
    tally = soak.history.tally
    rounded = f"{tally['rounded']} with log-probabilities within {soak.history.rounding:g}"
    ended = f"{tally['exact']} exact, {rounded}, {tally['left']} left by their clients, {len(lost)} otherwise"
    found = [
        Verdict("every request ended once, with the answer of a quiet run; all blocks free after", not lost, ended),
        Verdict("one owner at any time; exit 0; no process left", not wrong_at_end, "; ".join(wrong_at_end)[:300]),
        *found,
    ]
    print(json.dumps(dict(sorted(tally.items()))))
    if soak.quiets:
        last = soak.quiets[-1]
        print(f"{took_s:.0f} s, {last.restarts} restarts, when quiet {dict(soak.seen)}, moves {json.dumps(last.moves)}")
    for verdict in found:
        print(f"{WORDS[verdict.is_kept]} {verdict.promise}: {verdict.figures}")
    print(*lost[:20], sep="\n")
    if asked.output:
        write(asked, soak, found, took_s, lost + wrong_at_end)
    if asked.write and soak.quiets:
        row = {
            "length": f"{took_s / 60:.0f} min",
            "exact answers": tally["exact"],
            "left by their clients": tally["left"],
        }
        row |= {"lost, doubled, hung": len(lost), "restarts": last.restarts, "moves": json.dumps(last.moves)}
        row |= {one.promise: WORDS[one.is_kept].strip() for one in found[2:]}
        record("soak", rows_in_markdown([row]), f"2-core VM, {asked.workers} workers")
    return int(any(verdict.is_kept is False for verdict in found))


def play(directory: Path, asked: argparse.Namespace) -> tuple[Soak, list[str], float]:
    """Run a daemon for its whole time; return what was wrong at its end, and the seconds before that."""
    model, faults, decisions = directory / "model", directory / "faults", directory / "decisions.jsonl"
    make_demo_model(model)
    faults.mkdir()
    settings = {
        "scheduler.policy": asked.policy,
        "scheduler.decision_log": str(decisions),
        "idle.sleep_after_s": SLEEP_AFTER_S,
        "idle.stop_after_s": STOP_AFTER_S,
        "health.steady_after_s": 0.0,
        "server.drain_s": 1.0,
    }
    flags = ["--device", f"cpu:{asked.workers}", "--kv-bytes", asked.kv_bytes]
    for key, value in settings.items():
        flags += ["--set", f"{key}={json.dumps(value)}"]
    with DaemonProcess(model, *flags, environment={"MELLD_FAULTS": str(faults)}) as daemon:
        daemon.wait_ready()
        print("ready", flush=True)
        subject = Subject(daemon, model, decisions, faults)
        soak, began_s = Soak(subject, asked), time.monotonic()
        soak.run()
        took_s = time.monotonic() - began_s
        wrong_at_end = subject.judge_end()
        if wrong_at_end and asked.output:  # to be looked into
            shutil.copy(decisions, asked.output.with_suffix(".decisions.jsonl"))
        return soak, wrong_at_end, took_s


def write(asked: argparse.Namespace, soak: Soak, found: list[Verdict], took_s: float, lost: list[str]) -> None:
    """Write all figures, as JSON."""
    facts = {
        "asked": {name: str(value) for name, value in vars(asked).items()},
        "took_s": took_s,
        "load": os.getloadavg(),
        "tally": soak.history.tally,
        "states_when_quiet": soak.seen,
        "back_s": sorted(soak.history.back_s),
        "wrong": lost,
        "verdicts": found,
        "quiets": soak.quiets,
    }
    asked.output.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1))


def parse() -> argparse.Namespace:
    """Return the flags."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no round begins after so long")
    parser.add_argument("--round-s", type=float, default=40.0, help="traffic between two pauses")
    parser.add_argument("--warm-up-s", type=float, default=150.0, help="age from which memory is judged")
    parser.add_argument("--stop-every", type=int, default=15, help="rounds between two ends of all workers' processes")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kv-bytes", default="8MiB", help="of each worker")
    parser.add_argument("--policy", default="mell-plus")
    parser.add_argument("--harm-every-s", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="a file for all figures, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
