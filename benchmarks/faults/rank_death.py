"""How long streams stand still when a rank of their worker is killed.

A daemon of two workers with two CPU devices each, and two streams on one of them; in each round one of its ranks is
killed (-9).  From the kill until the next token of each stream there are the news of the death, the prompt and its
tokens so far, computed anew on the other worker, and one step.  Each stream must end as one that nothing happened to.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import harness
from melld.demo_model import make_demo_model
from tests.migrate.live import GREEDY, Stream
from tests.migrate.test_tensor_parallel import Group
from tests.serve.daemon_process import DaemonProcess

TOKENS = 300
BODY = GREEDY | {"max_tokens": TOKENS, "ignore_eos": True}


def killed(group: Group) -> list[float]:
    """Kill a rank of the worker that runs two streams; return the seconds until each one's next token."""
    streams = [Stream(group.daemon, BODY)]
    streams[0].wait_chunks(TOKENS // 6)
    worker = group.worker_of(streams[0])
    while len(streams) < 2 or group.worker_of(streams[-1]) != worker:
        streams.append(Stream(group.daemon, BODY))
        streams[-1].wait_chunks(2)
    victim = group.ranks(worker)[-1]
    here = [stream for stream in streams if group.worker_of(stream) == worker]
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    assert len({stream.result().choices[0].text for stream in streams}) == 1, "an answer is another one"
    return [next(at_s for at_s in stream.arrivals_s if at_s > killed_s + 0.001) - killed_s for stream in here]


def main() -> int:
    """Kill, measure, print."""
    parser = harness.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    flags = ("--device", "cpu:4", "--set", "devices.per_worker=2")
    flags += ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
    waits_s: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        make_demo_model(Path(directory))
        with DaemonProcess(Path(directory), *flags, "--set", "health.steady_after_s=0") as daemon:
            group = Group(daemon.wait_ready())
            for _ in range(asked.rounds):
                group.operator.wait_ready()
                waits_s += killed(group)
                print([round(wait_s, 3) for wait_s in waits_s], flush=True)
    found = f"{statistics.median(waits_s):.2f} s | {max(waits_s):.2f} s | {len(waits_s)}"
    table = f"| what | median | longest | streams |\n|---|---|---|---|\n| kill of a rank to the next token | {found} |"
    print(table)
    if asked.write:
        harness.record("rank-death", table, "two CPU cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
