"""The parts of `migration.py` that need a daemon: what its clients see while requests are moved."""

import itertools
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Setting
from tests.migrate.live import Operator, Stream

SETTLE_CHUNKS = 40
WINDOWS_A_ROUND = 6
GREEDY = {"temperature": 0, "ignore_eos": True}


class Served:
    """`melld serve` with two workers, in a process of its own that runs `change` first."""

    def __init__(self, setting: Setting, model: Path, run: Path, change: str, flags: tuple[str, ...] = ()) -> None:
        self.runtime_directory = run
        words = ["serve", "--model", str(model), "--name", "demo", "--port", "0", "--runtime-directory", str(run)]
        words += [*setting.serve_flags(2), *flags]
        code = f"{change}\nimport sys\nfrom melld.cli import main\nsys.exit(main({words!r}))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self.url, links, said = "", 0, [""]
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said.append(line)
            links += "KV from" in line and " by " in line
            if not self.url and "/v1" in line and any("melld: ready" in earlier for earlier in said):
                self.url = line.split()[-1].removesuffix("/v1")
            if self.url and links == 2:
                break
        else:
            raise RuntimeError("it does not serve:\n" + "".join(said))
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def steps(stream: Stream, began_s: float, end_s: float) -> list[float]:
    """Return the times between two chunks of which the later one came in this time."""
    arrivals = list(stream.arrivals_s)
    return [after - before for before, after in itertools.pairwise(arrivals) if began_s < after <= end_s]


class Gaps:
    """What the moves of one way have shown."""

    def __init__(self, way: str, tokens: int) -> None:
        self._facts = {"way": way, "tokens": tokens}
        self._reports: list[Any] = []
        self._gaps_s: list[float] = []
        self._idle_s: list[float] = []
        self._steps_s: list[float] = []

    def add(self, stream: Stream, began_s: float, report: Any) -> None:
        """Add a move of this stream, begun then, and wait for what follows it."""
        ended_s = time.monotonic()
        stream.wait_chunks(len(stream.arrivals_s) + 12)
        median_s = statistics.median(steps(stream, began_s - 5.0, began_s))
        took_s = ended_s - began_s + 10 * median_s
        self._reports.append(report)
        self._steps_s.append(median_s)
        self._gaps_s.append(max(steps(stream, began_s, began_s + took_s), default=0.0) - median_s)
        before = steps(stream, began_s - took_s, began_s)
        if began_s - took_s > stream.arrivals_s[3]:
            self._idle_s.append(max(before, default=median_s) - median_s)

    def row(self) -> dict[str, Any]:
        """Medians, in milliseconds."""
        done = [report for report in self._reports if report["outcome"] == "committed"]
        copied = [(report["copied_bytes"], report["copy_s"]) for report in done if report["copy_s"]]
        return self._facts | {
            "moves": len(self._reports),
            "committed": len(done),
            "gap_ms": _ms(self._gaps_s),
            "gaps_ms": [round(gap_s * 1e3, 1) for gap_s in self._gaps_s],
            "idle_ms": _ms(self._idle_s),
            "step_ms": _ms(self._steps_s),
            "daemon_gap_ms": _ms([report["gap_s"] for report in done if report["gap_s"] is not None]),
            "total_ms": _ms([report["total_s"] for report in done]),
            "mib": round(statistics.median([nbytes / 2**20 for nbytes, _ in copied] or [0.0]), 1),
            "gib_per_s": round(statistics.median([nbytes / s / 2**30 for nbytes, s in copied] or [0.0]), 2),
        }


def moved_bytes(served: Served, tokens: int) -> int:
    """Move a request of so many tokens once; return what was copied."""
    daemon: Any = served
    stream = Stream(daemon, body_of(tokens))
    stream.wait_chunks(2)
    [report] = Operator(daemon).move(stream, "kv")
    stream.leave()
    Operator(daemon).wait_idle()
    return int(report["copied_bytes"])


def body_of(tokens: int) -> dict[str, Any]:
    """Return what is asked: a prompt of so many tokens, and an answer that outlasts many moves."""
    prompt = [random.Random(tokens).randrange(10, 250) for _ in range(tokens)]
    return {"prompt": prompt, "max_tokens": 12000, **GREEDY}


def gaps_by_kv(ways: dict[str, tuple[Served, str]], tokens: dict[str, int], repeats: int) -> Iterator[dict[str, Any]]:
    """Move one request of so many tokens on each daemon there and back; the ways take turns."""
    daemons: dict[int, Any] = {id(served): served for served, _ in ways.values()}
    streams = {id(served): Stream(daemons[id(served)], body_of(tokens[way])) for way, (served, _) in ways.items()}
    gaps = {way: Gaps(way, tokens[way]) for way in ways}
    for stream in streams.values():
        stream.wait_chunks(SETTLE_CHUNKS)
    for turn in range(repeats + 1):
        for way, (served, via) in ways.items():
            stream = streams[id(served)]
            stream.wait_chunks(len(stream.arrivals_s) + SETTLE_CHUNKS)
            began_s = time.monotonic()
            [report] = Operator(daemons[id(served)]).move(stream, via)
            if turn:  # the first of its size also warms the worker up
                gaps[way].add(stream, began_s, report)
    for stream in streams.values():
        stream.leave()
    for daemon in daemons.values():
        Operator(daemon).wait_idle()
    for found in gaps.values():
        yield found.row()


def gaps_by_tokens(ways: dict[str, Served], tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Fresh requests, one move each, while three others decode on each worker; and what those see meanwhile."""
    chance = random.Random(tokens)
    for way, served in ways.items():
        daemon: Any = served
        operator, gaps = Operator(daemon), Gaps(way, tokens)
        others = [Stream(daemon, {"prompt": list(range(10, 210)), "max_tokens": 20000, **GREEDY}) for _ in range(6)]
        for other in others:
            other.wait_chunks(SETTLE_CHUNKS)
        medians, longest = [], []
        for _ in range(repeats):
            prompt = [chance.randrange(10, 250) for _ in range(tokens)]
            stream = Stream(daemon, {"prompt": prompt, "max_tokens": 8000, **GREEDY})
            stream.wait_chunks(SETTLE_CHUNKS)
            began_s = time.monotonic()
            [report] = operator.move(stream, "tokens")
            seen = [step for other in others for step in steps(other, began_s, time.monotonic())]
            medians.append(statistics.median(seen))
            longest.append(max(seen))
            gaps.add(stream, began_s, report)
            stream.leave()
            stream.join()
        for other in others:
            other.leave()
        operator.wait_idle()
        yield gaps.row() | {"others_median_ms": _ms(medians), "others_longest_ms": _ms(longest)}


def _ms(seconds: list[float]) -> float | None:
    return round(statistics.median(seconds) * 1e3, 2) if seconds else None
