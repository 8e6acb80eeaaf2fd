"""What a live migration costs: the client's gap, the copy's rate, the neighbours' pace; `PYTHONPATH=. python FILE`.

Two workers on the CPU.  Moves as melld makes them stand beside two baselines, made by a daemon whose lifecycle table is
changed: stop-and-copy (no round before the freeze) and re-prefill (nothing computed ahead of the freeze).

    gap   the longest time between two chunks around the move, less the median of the same run, as the client sees it
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from melld.demo_model import make_demo_model
from tests.migrate.live import Operator, Stream

AS_IT_IS = ""
BASELINE = """
import melld.migrate.migration as m, melld.migrate.migration_table as t
m.MAX_ROUNDS = 0
t.TRANSITIONS[t.MoveState.LOOKING, t.Sign.BY_TOKENS] = t.MoveState.RESERVING
"""
WAYS = {("kv", AS_IT_IS): "kv", ("tokens", AS_IT_IS): "tokens"}
BASELINES = {("kv", BASELINE): "stop-and-copy", ("tokens", BASELINE): "re-prefill"}


class Served:
    """`melld serve` with two workers, in a process of its own that runs `change` first."""

    def __init__(self, model: Path, run: Path, change: str) -> None:
        self.runtime_directory = run
        words = ["serve", "--model", str(model), "--name", "demo", "--port", "0", "--device", "cpu:2"]
        words += ["--kv-bytes", "192MiB", "--runtime-directory", str(run), "--set", 'scheduler.policy="most-free"']
        code = f"{change}\nimport sys\nfrom melld.cli import main\nsys.exit(main({words!r}))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "/v1" in line:
                self.url = line.split()[-1].removesuffix("/v1")
                break
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        time.sleep(2.0)  # both links

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def gap_of(daemon: Any, tokens: int, via: str, chance: random.Random) -> tuple[float, float, Any]:
    """(gap, median, report) of one move in mid-answer of a request with a prompt of so many tokens."""
    prompt = [chance.randrange(10, 250) for _ in range(tokens)]
    body = {"prompt": prompt, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    stream, operator = Stream(daemon, body), Operator(daemon)
    stream.wait_chunks(40)
    began_s = time.monotonic()
    reports = operator.move(stream, via)
    stream.result()
    if not reports:  # the machine had no time for us, and the request ended first
        return gap_of(daemon, tokens, via, chance)
    [report] = reports
    pairs = list(zip(stream.arrivals_s, stream.arrivals_s[1:], strict=False))
    median_s = statistics.median(after - before for before, after in pairs)
    around = [after - before for before, after in pairs if after >= began_s]
    end_s = began_s + report["total_s"] + 10 * median_s
    around = [after - before for before, after in pairs if after >= began_s and before <= end_s]
    return max(around) - median_s, median_s, report


def measure_gaps(daemon: Any, ways: dict[Any, str], lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each way and length: medians over the repeats."""
    chance, rows = random.Random(1), []
    for tokens in lengths:
        for (via, _), name in ways.items():
            gap_of(daemon, tokens, via, chance)  # the first of its size also warms the worker up
            runs = [gap_of(daemon, tokens, via, chance) for _ in range(repeats)]
            reports = [report for *_, report in runs if report["outcome"] == "committed"]
            moved = [report for report in reports if report["copy_s"]]
            row = {
                "way": name,
                "tokens": tokens,
                "moves": len(reports),
                "gap_ms": statistics.median(gap_s for gap_s, *_ in runs) * 1e3,
                "step_ms": statistics.median(median_s for _, median_s, _ in runs) * 1e3,
                "daemon_gap_ms": statistics.median(report["gap_s"] or 0.0 for report in reports) * 1e3,
                "mib": statistics.median(report["copied_bytes"] for report in reports) / 2**20,
                "gib_per_s": statistics.median([r["copied_bytes"] / r["copy_s"] for r in moved] or [0.0]) / 2**30,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def copy_limit_gib_per_s(nbytes: int = 64 << 20) -> float:
    """One large copy of memory by one thread."""
    import torch

    source, destination = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    torch.set_num_threads(1)
    times = []
    for _ in range(9):
        began_s = time.perf_counter()
        destination.copy_(source)
        times.append(time.perf_counter() - began_s)
    return nbytes / statistics.median(times) / 2**30


def neighbours(daemon: Any, seconds: float, *, moving: bool) -> tuple[float, float]:
    """Median and 99th percentile of six streams' time between chunks, while a seventh moves each second or not."""
    body = {"prompt": list(range(10, 210)), "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
    streams, operator = [Stream(daemon, body) for _ in range(7)], Operator(daemon)
    for stream in streams:
        stream.wait_chunks(20)
    began_s = time.monotonic()
    while time.monotonic() < began_s + seconds:
        turn_s = time.monotonic()
        if moving:
            operator.move(streams[0], "kv")
        time.sleep(max(0.0, turn_s + 1.0 - time.monotonic()))
    end_s = time.monotonic()
    for stream in streams:
        stream.leave()
    operator.wait_idle()
    gaps = [
        after - before
        for stream in streams[1:]
        for before, after in zip(stream.arrivals_s, stream.arrivals_s[1:], strict=False)
        if before > began_s and after < end_s
    ]
    return statistics.median(gaps) * 1e3, statistics.quantiles(gaps, n=100)[98] * 1e3


def main() -> int:
    """Measure, print, and write the rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 15800])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--out", type=Path, default=Path("migration.json"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_demo_model(model)
        with Served(model, Path(directory) / "run", AS_IT_IS) as daemon:
            rows = measure_gaps(daemon, WAYS, asked.lengths, asked.repeats)
            pairs = [[neighbours(daemon, asked.seconds, moving=moving) for moving in (False, True)] for _ in range(2)]
        with Served(model, Path(directory) / "run2", BASELINE) as daemon:
            rows += measure_gaps(daemon, BASELINES, asked.lengths, asked.repeats)
    result = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "copy_limit_gib_per_s": copy_limit_gib_per_s(),
        "neighbours_ms": pairs,
        "rows": rows,
    }
    asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
