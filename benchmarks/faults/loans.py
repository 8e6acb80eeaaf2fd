"""Loans under load, with random ends; `python -m benchmarks.faults.loans [--loans 30]`.

A daemon with two CPU workers, whose steps a stand-in for a large model's pace slows down, and eight streams on each.
`melld run` borrows the cheapest device again and again, a PyTorch program among the borrowers; each loan ends by an
exit, by a signal, or by `kill -9` of either the program or `melld run`.

    start   from the start of `melld run` to the program's first line, beside the slowest move for that loan
    back    from a `kill -9` of `melld run` until the daemon has begun to start the worker
    cut     streams that ended with an error; altered: those whose answer is another than when nothing moves
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import markdown, parser_of, record
from melld.control.client import ControlClient
from melld.control.messages import AskStory
from melld.decisions.stories import Happened
from tests.migrate.live import Answer, Operator, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

STREAMS, KINDS, TOKENS, SLOW_S = 16, 8, 120, 0.004
HEAD = [
    "loans",
    "streams whole, altered, cut",
    "moves",
    "start, s",
    "slowest move, s",
    "start / slowest move",
    "back, s",
]
"""Medians, and in brackets the longest."""
ENDS = ("exit", "failure", "SIGTERM", "SIGINT", "SIGKILL of the program", "SIGKILL of melld run")
TRAINING = """
import os, torch
torch.set_num_threads(1)
print(os.environ["MELLD_DEVICES"], os.getpid(), flush=True)
layer = torch.nn.Linear(64, 64)
descent = torch.optim.SGD(layer.parameters(), lr=0.01)
for _ in range(20):
    descent.zero_grad()
    (layer(torch.randn(32, 64)) ** 2).mean().backward()
    descent.step()
"""
STAYS = 'echo "$MELLD_DEVICES" $$; exec sleep 1000'
FAILS = 'echo "$MELLD_DEVICES" $$; exit 9'


def body_of(number: int) -> dict[str, Any]:
    """Return a request that shares no block with those of other kinds."""
    prompt, alone = list(range(5 + number, 45 + number)), {"cache_salt": str(number)}
    return {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, "prompt": prompt, **alone}


class Load:
    """So many streams at a time, each followed by the next, until `end`."""

    def __init__(self, daemon: DaemonProcess, answers: dict[int, Answer]) -> None:
        self.cut = self.altered = self.whole = 0
        self.arrivals_s: list[list[float]] = []
        """Of each stream's chunks."""
        self._daemon = daemon
        self._answers = answers
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number % KINDS,)) for number in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self, kind: int) -> None:
        while not self._over.is_set():
            stream = Stream(self._daemon, body_of(kind))
            answer = stream.result()
            self.arrivals_s.append(stream.arrivals_s)
            self.cut += answer.error is not None
            self.altered += answer.error is None and answer != self._answers[kind]
            self.whole += answer == self._answers[kind]

    def end(self) -> None:
        """Let the last streams end."""
        self._over.set()
        for thread in self._threads:
            thread.join()


class Bench:
    """Makes the loans, and notes what they took."""

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        self.starts: list[tuple[float, float]] = []
        self.moves = 0
        self.backs: list[float] = []
        self._daemon = daemon
        self._chance = random.Random(seed)
        self._operator = Operator(daemon)
        self._client = ControlClient([daemon.runtime_directory], answer_s=60.0)

    def lend(self, how: str) -> None:
        """Make one loan with this end, once both workers have requests."""
        self._operator.wait(
            lambda status: len({one["worker"] for one in status["requests"] if one["output_tokens"]} - {None}) == 2, 170
        )
        there = [one["request"] for one in self._operator.status()["requests"]]
        shell = ["sh", "-c", FAILS if how == "failure" else STAYS]
        program = [sys.executable, "-c", TRAINING] if how == "exit" else shell
        words = ["run", "--runtime-directory", str(self._daemon.runtime_directory), "--wait", "60", "--", *program]
        begun_s = time.monotonic()
        run = subprocess.Popen([sys.executable, "-m", "melld", *words], stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        line = run.stdout.readline().split()
        took_s = time.monotonic() - begun_s
        moves_s = [move_s for request in there for move_s in self._moves(request, run.pid)]
        self.moves += len(moves_s)
        if moves_s and how != "exit":  # which imports PyTorch before its first line
            self.starts.append((took_s, max(moves_s)))
        self._end(run, how, int(line[1]))

    def _moves(self, request: str, pid: int) -> Iterator[float]:
        """Yield what each of the request's moves for the loan of that `melld run` took, as `melld why` tells it."""
        is_for_it = False
        for line in json.loads(self._client.operate("why", AskStory(request=request)))["lines"]:
            if line["what"] == Happened.MOVE_BEGAN:
                is_for_it = f"(pid {pid}, " in line.get("reason", "")
            elif line["what"] == Happened.MOVED and is_for_it:
                yield line["took_s"]

    def _end(self, run: subprocess.Popen[str], how: str, pid: int) -> None:
        delay_s = self._chance.uniform(0.0, 1.5)
        time.sleep(delay_s if how not in ("exit", "failure") else 0.0)
        killed_s = time.monotonic()
        match how:
            case "SIGTERM" | "SIGINT":
                run.send_signal(getattr(signal, how))
            case "SIGKILL of the program":
                os.kill(pid, signal.SIGKILL)
            case "SIGKILL of melld run":
                run.kill()
                self._operator.wait(lambda status: not any(one["loan"] for one in status["workers"]), 30)
                self.backs.append(time.monotonic() - killed_s)
        expected = {"exit": 0, "failure": 9, "SIGTERM": 143, "SIGINT": 130, "SIGKILL of the program": 137}
        code = run.wait(300)
        assert code == expected.get(how, -signal.SIGKILL), (how, code)


def main() -> None:
    """Make the loans and print the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--loans", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background command ignores it, as would its children
    tell("loans", HEAD, lambda daemon: _measured(daemon, options.loans, options.seed), writes=options.write)


def tell(name: str, head: list[str], measured: Callable[[DaemonProcess], list[str]], *, writes: bool) -> None:
    """Print, and perhaps record, the row that is measured on a daemon with two CPU workers."""
    with tempfile.TemporaryDirectory(prefix="melld-") as parent:
        model = Path(parent) / "demo"
        subprocess.run([sys.executable, "-m", "melld", "demo-model", str(model)], check=True)
        flags = ["--device", "cpu:2", "--kv-bytes", "64MiB", "--set", 'scheduler.policy="most-free"']
        with DaemonProcess(model, *flags, harmable=True) as daemon:
            daemon.wait_ready()
            Operator(daemon).wait_linked(daemon)
            cells = measured(daemon)
    print(" | ".join(cells), flush=True)
    if writes:
        record(name, markdown(head, [cells]), "two CPU cores")


def _measured(daemon: DaemonProcess, loans: int, seed: int) -> list[str]:
    asked = {kind: Stream(daemon, body_of(kind)) for kind in range(KINDS)}
    answers = {kind: stream.result() for kind, stream in asked.items()}
    bench = Bench(daemon, seed)
    ends = [ENDS[number % len(ENDS)] for number in range(loans)]
    random.Random(seed).shuffle(ends)
    with slowed(daemon.faults, SLOW_S):
        load = Load(daemon, answers)
        try:
            for number, how in enumerate(ends):
                bench.lend(how)
                print(f"{number + 1}: {how}", flush=True)
        finally:
            load.end()
    starts_s, moves_s = zip(*bench.starts, strict=True)
    ratios = [took_s / move_s for took_s, move_s in bench.starts]
    seconds = "{:.2f} ({:.2f})".format
    return [
        f"{loans}",
        f"{load.whole}, {load.altered}, {load.cut}",
        f"{bench.moves}",
        seconds(statistics.median(starts_s), max(starts_s)),
        seconds(statistics.median(moves_s), max(moves_s)),
        seconds(statistics.median(ratios), max(ratios)),
        seconds(statistics.median(bench.backs), max(bench.backs)),
    ]


if __name__ == "__main__":
    main()
