"""Renewals under load; `python -m benchmarks.faults.renew [--renewals 3]`.

A daemon with two CPU workers, whose steps a stand-in for a large model's pace slows down, and sixteen streams at a
time.  It is renewed again and again; each next one is forked from a process that has made the imports.

    pause   the longest time between two chunks of a stream during a renewal, beside the longest in the ten seconds
            before it
    wait    the longest time that a client waited for the answer to GET /health, on a connection of its own
"""

import http.client
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from benchmarks.faults.loans import KINDS, SLOW_S, Load, body_of, tell
from benchmarks.harness import parser_of
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
    os.kill(daemon.status()["pid"], signal.SIGTERM)  # which is none of this process's children by now
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
    parser = parser_of(__doc__)
    parser.add_argument("--renewals", type=int, default=3)
    options = parser.parse_args()
    nursery()  # which the daemon must know, to fork its successor from it
    tell("renew", HEAD, lambda daemon: renewed(daemon, options.renewals), writes=options.write)


if __name__ == "__main__":
    main()
