"""Renewals under load; `PYTHONPATH=. python benchmarks/renew.py [--renewals 3]`.

A daemon with two CPU workers, whose steps a stand-in for a large model's pace slows down, and sixteen streams at a
time.  It is renewed again and again; each next one is forked from a process that has made the imports.

    pause   the longest time between two chunks of a stream during a renewal, beside the longest in the ten seconds
            before it
    wait    the longest time that a client waited for the answer to GET /health, on a connection of its own
"""

import argparse
import http.client
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.loans import KINDS, SLOW_S, Load, body_of
from benchmarks.tables import record
from tests.forked import nursery
from tests.migrate.live import Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

HEAD = [
    "renewals",
    "streams whole, altered, cut",
    "took, s",
    "longest pause, s",
    "before, s",
    "pause / before",
    "wait, s",
]
"""The longest of each."""
EVERY_S = 0.02


class Knocker(threading.Thread):
    """Asks for /health on a new connection again and again."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.waits: list[tuple[float, float]] = []
        """When an answer came, and how long it took."""
        self._address = urlsplit(url).netloc
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """Ask until `end`."""
        while not self._over.wait(EVERY_S):
            began_s = time.monotonic()
            connection = http.client.HTTPConnection(self._address, timeout=120)
            connection.request("GET", "/health", headers={"Connection": "close"})
            status = connection.getresponse().status
            connection.close()
            assert status == 200, status
            self.waits.append((time.monotonic(), time.monotonic() - began_s))

    def end(self) -> None:
        """Ask no more."""
        self._over.set()
        self.join()


def longest_gap_s(streams: Sequence[Sequence[float]], since_s: float, until_s: float) -> float:
    """Return the longest time between two chunks of a stream, of those that ended in this time."""
    pairs = (pair for arrivals in streams for pair in itertools.pairwise(arrivals))
    return max((later - earlier for earlier, later in pairs if since_s < later < until_s), default=0.0)


def renewed(daemon: DaemonProcess, renewals: int) -> list[str]:
    """Renew the daemon so often; return the row."""
    answers = {kind: Stream(daemon, body_of(kind)).result() for kind in range(KINDS)}
    operator, spans = Operator(daemon), []
    with slowed(daemon.faults, SLOW_S):
        load, knocker = Load(daemon, answers), Knocker(daemon.url)
        try:
            for _ in range(renewals):
                began_s = time.monotonic()
                time.sleep(10.0)
                asked_s = time.monotonic()
                done = daemon.melld("renew")
                assert done.returncode == 0, done.stderr
                operator.wait(lambda status: not status["renewal"], 170)
                spans.append((began_s, asked_s, time.monotonic()))
                operator.wait_ready()
                print(f"{len(spans)}: {spans[-1][2] - asked_s:.1f} s", flush=True)
        finally:
            load.end()
            knocker.end()
    pauses_s = [longest_gap_s(load.arrivals_s, asked_s, over_s) for _, asked_s, over_s in spans]
    before_s = [longest_gap_s(load.arrivals_s, began_s, asked_s) for began_s, asked_s, _ in spans]
    waits_s = [wait for at_s, wait in knocker.waits if any(asked_s < at_s < over_s for _, asked_s, over_s in spans)]
    return [
        f"{renewals}",
        f"{load.whole}, {load.altered}, {load.cut}",
        f"{max(over_s - asked_s for _, asked_s, over_s in spans):.1f}",
        f"{max(pauses_s):.2f}",
        f"{max(before_s):.2f}",
        f"{max(pause / before for pause, before in zip(pauses_s, before_s, strict=True)):.2f}",
        f"{max(waits_s):.2f}",
    ]


def main() -> None:
    """Make the renewals and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renewals", type=int, default=3)
    parser.add_argument("--write", type=Path, help="folder for renew.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="melld-") as parent:
        model = Path(parent) / "demo"
        subprocess.run([sys.executable, "-m", "melld", "demo-model", str(model)], check=True)
        flags = ["--device", "cpu:2", "--kv-bytes", "64MiB", "--set", 'scheduler.policy="most-free"']
        nursery()  # which the daemon must know, to fork its successor from it
        with DaemonProcess(model, *flags, harmable=True) as daemon:
            daemon.wait_ready()
            cells = renewed(daemon, options.renewals)
            os.kill(daemon.status()["pid"], signal.SIGTERM)
    print(" | ".join(cells), flush=True)
    if options.write is not None:
        table = "\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), cells))
        record(options.write, "renew", table, "two CPU cores")


if __name__ == "__main__":
    main()
