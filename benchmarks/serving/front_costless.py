"""What one process in front of eight engines delivers: engines that compute nothing, melld's daemon and vLLM's server.

    python -m benchmarks.serving.front_costless rate 64 256 [--write]
    python -m benchmarks.serving.front_costless gaps 64 [--write]
    python -m benchmarks.serving.front_costless at-once 1024

`rate`: tokens and events a second, of so many streams for each engine, where the engines make more than any process
passes on, in turns.  vLLM's server has one engine with as many requests: one message a step is the least work for it.
`gaps`: the longest pause of streams that are moved, or whose worker is killed, while the others go on; in steps.
`at-once`: all begin at once; each must be answered, to its end, with the tokens that its worker makes.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import re
import selectors
import signal
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness import CPU, markdown, parser_of, record
from benchmarks.serving.front_path import PLAIN, Kind, Server, ask_all, asked, chat, listener, processor_s, tokens_in
from benchmarks.serving.serve_vs_vllm import vllm_serve
from melld.demo_model import make_demo_model
from tests.migrate.live import Operator
from tests.serve.daemon_process import DaemonProcess

WORKERS = 8
TOKENS_OUT = 300
PACED_STEP_S = 0.1
"""Of the gaps: long enough for the daemon to keep up with all streams."""
WATCHED = 16
"""Streams whose pauses are measured."""
FLAGS = ("--device", f"cpu:{WORKERS}", "--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
SAID = re.compile(rb'"content":"((?:[^"\\]|\\.)*)"')


def stream_of(tokens: int) -> Kind:
    """Return a chat of so many tokens."""
    return Kind(PLAIN, "chat/completions", chat(max_tokens=tokens))


@contextlib.contextmanager
def costless_daemon(*words: str, step_s: float = 0.005, flags: tuple[str, ...] = ()) -> Iterator[DaemonProcess]:
    """Start a daemon before costless workers."""
    with tempfile.TemporaryDirectory() as name:
        make_demo_model(Path(name) / "demo")
        program = ("-m", "benchmarks.serving.costless", *words)
        paced = {"COSTLESS_STEP_S": str(step_s)}
        with DaemonProcess(
            Path(name) / "demo", *FLAGS, *flags, genuine=True, program=program, environment=paced
        ) as daemon:
            yield daemon.wait_ready()


def room_for(streams: int) -> tuple[str, ...]:
    """Return the flags of a daemon that takes so many requests at once, and the warm-up's."""
    return "--set", f"server.max_concurrent_requests={2 * streams}"


@contextlib.contextmanager
def front(way: str, streams: int) -> Iterator[Server]:
    """Start a server of this kind before costless engines."""
    if way != "vLLM":
        words = ["--whole"] if way == "melld, events by vLLM" else []
        with costless_daemon(*words, flags=room_for(streams)) as daemon:
            yield Server(daemon.url, daemon.process.pid)
        return
    with tempfile.TemporaryDirectory() as name:
        directory, model = Path(name), Path(name) / "demo"
        make_demo_model(model)
        words = [
            "--distributed-executor-backend",
            "benchmarks.serving.costless_vllm.CostlessExecutor",
            "--no-async-scheduling",
        ]
        words += [
            "--max-num-seqs",
            str(streams),
            "--max-num-batched-tokens",
            "65536",
            "--kv-cache-memory-bytes",
            str(1 << 30),
        ]
        with vllm_serve(model, directory, *words, setting=CPU) as url:
            yield Server(url, listener(url))


def measure_rates(each: list[int], ways: list[str], rounds: int) -> list[list[str]]:
    """Measure each way in turns."""
    rows = []
    for streams in each:
        for way in ways:
            with front(way, WORKERS * streams) as server:
                measured = [rate(server, WORKERS * streams) for _ in range(rounds)]
            middle = [statistics.median(column) for column in zip(*measured, strict=True)]
            rows.append([f"{WORKERS} x {streams}", way, *(f"{one:,.{0 if one > 100 else 1}f}" for one in middle)])
            print(*rows[-1], sep=" | ", flush=True)
    return rows


def rate(server: Server, streams: int) -> list[float]:
    """Return tokens and events a second, microseconds of each, and how late `/health` is meanwhile, in ms."""
    kind = stream_of(TOKENS_OUT)
    server.ask(kind, WORKERS)
    with asking_health(server.url) as delays_s:
        began_s = time.monotonic()
        answers = server.ask(kind, streams)
        took_s = time.monotonic() - began_s
    late_s = statistics.quantiles(delays_s, n=100)[98]
    per = answers.token_s * 1e6, answers.event_s * 1e6
    return [answers.tokens / took_s, answers.events / took_s, *per, late_s * 1e3]


@contextlib.contextmanager
def asking_health(url: str) -> Iterator[list[float]]:
    """Ask for `/health` fifty times a second, in a process of its own; the delays are there afterwards."""
    delays_s: list[float] = []
    over, told = multiprocessing.Event(), multiprocessing.SimpleQueue()
    asking = multiprocessing.Process(target=ask_health, args=(url, over, told), daemon=True)
    asking.start()
    yield delays_s
    over.set()
    delays_s += told.get()
    asking.join()


def ask_health(url: str, over: Any, told: Any) -> None:
    """Ask until it is over, then tell all delays, in seconds."""
    delays_s = []
    while not over.wait(0.02):
        began_s = time.monotonic()
        with urllib.request.urlopen(url + "/health", timeout=60) as answer:
            answer.read()
        delays_s.append(time.monotonic() - began_s)
    told.put(delays_s)


class Watched:
    """Streams whose every piece is timed, in a thread of their own."""

    def __init__(self, url: str, kind: Kind) -> None:
        address = urlsplit(url)
        self.came_s: dict[int, list[float]] = {seed: [] for seed in range(WATCHED)}
        self.answers: dict[int, bytes] = dict.fromkeys(range(WATCHED), b"")
        self._selector = selectors.DefaultSelector()
        for seed in range(WATCHED):
            connection = socket.create_connection((address.hostname, address.port))
            connection.sendall(asked(address.netloc, kind, seed, "watched"))
            self._selector.register(connection, selectors.EVENT_READ, seed)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                piece = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                self.came_s[key.data].append(time.monotonic())
                self.answers[key.data] += piece
                if not piece:
                    self._selector.unregister(key.fileobj)

    def wait(self) -> None:
        """Return when all have ended."""
        self._reading.join()

    def pause_s(self, seed: int, from_s: float, to_s: float) -> float:
        """Return the longest pause of a stream within this time."""
        times = [at_s for at_s in self.came_s[seed] if from_s <= at_s <= to_s]
        return max(after - before for before, after in itertools.pairwise(times))


def measure_gaps(each: int) -> list[list[str]]:
    """Move some streams, then kill a worker under others."""
    kind = stream_of(TOKENS_OUT)
    with costless_daemon(step_s=PACED_STEP_S) as daemon:
        ask_all(daemon.url, stream_of(8), WORKERS)
        with asking_health(daemon.url) as delays_s:
            others = threading.Thread(target=lambda: texts.extend(ask_all(daemon.url, kind, WORKERS * each - WATCHED)))
            texts: list[bytes] = []
            watched = Watched(daemon.url, kind)
            others.start()
            while len(workers := workers_of(daemon)) < WORKERS * each:
                time.sleep(PACED_STEP_S)
            pauses = [moved_s(daemon, watched, seed, workers) for seed in range(WATCHED // 2)]
            before_s = time.monotonic()
            workers = workers_of(daemon)
            lost = workers[one_of(workers, WATCHED - 1)]
            (pid,) = (one["pid"] for one in daemon.status()["workers"] if one["worker"] == lost)
            os.kill(pid, signal.SIGKILL)
            watched.wait()
            others.join()
    hit = [seed for seed in range(WATCHED) if workers[one_of(workers, seed)] == lost]
    killed = [watched.pause_s(seed, before_s - 2 * PACED_STEP_S, before_s + 2.0) for seed in hit]
    steps = [after - before for times in watched.came_s.values() for before, after in itertools.pairwise(times)]
    step_s = statistics.median(steps)
    assert len({text_in(one) for one in (*texts, *watched.answers.values())}) == 1, "not all streams are alike"
    late_s = statistics.quantiles(delays_s, n=100)[98]
    row = [f"{WORKERS} x {each}", f"{step_s * 1e3:.0f} ms", in_steps(pauses, step_s), in_steps(killed, step_s)]
    print(*row, f"{late_s * 1e3:.0f}", sep=" | ")
    return [[*row, f"{late_s * 1e3:.0f}"]]


def in_steps(pauses_s: list[float], step_s: float) -> str:
    """Return the median of the pauses and the longest, in steps."""
    steps = [one / step_s for one in pauses_s]
    return f"{statistics.median(steps):.2f} ({max(steps):.2f}), {len(steps)} streams"


def workers_of(daemon: DaemonProcess) -> dict[str, str]:
    """Return each placed request's worker."""
    return {one["request"]: one["worker"] for one in daemon.status()["requests"] if one["worker"]}


def one_of(workers: dict[str, str], seed: int) -> str:
    """Return the id of the request with this seed."""
    (name,) = (name for name in workers if f"-watched{seed}-" in name)
    return name


def moved_s(daemon: DaemonProcess, watched: Watched, seed: int, workers: dict[str, str]) -> float:
    """Move a stream to the next worker; return its longest pause meanwhile."""
    request = one_of(workers, seed)
    names = sorted(set(workers.values()))
    destination = names[(names.index(workers[request]) + 1) % len(names)]
    began_s = time.monotonic() - PACED_STEP_S
    Operator(daemon).migrate(request, destination, None)
    time.sleep(2 * PACED_STEP_S)
    return watched.pause_s(seed, began_s, time.monotonic())


def text_in(answer: bytes) -> bytes:
    """Return what a stream has said."""
    body = b"".join(answer.split(b"\r\n"))
    return b"".join(SAID.findall(body))


def ask_at_once(streams: int) -> None:
    """Begin so many at once, and compare each with one that is alone."""
    with costless_daemon(flags=room_for(streams)) as daemon:
        (alone,) = ask_all(daemon.url, stream_of(TOKENS_OUT), 1)
        began_cpu_s, began_s = processor_s(daemon.process.pid), time.monotonic()
        answers = ask_all(daemon.url, stream_of(TOKENS_OUT), streams)
        took_s, cpu_s = time.monotonic() - began_s, processor_s(daemon.process.pid) - began_cpu_s
    answered = sum(one.startswith(b"HTTP/1.1 200") for one in answers)
    whole = sum(b"data: [DONE]" in one and tokens_in(one) == TOKENS_OUT for one in answers)
    exact = sum(text_in(one) == text_in(alone) for one in answers)
    told = {"streams": streams, "answered": answered, "whole": whole, "exact": exact, "took_s": took_s, "cpu_s": cpu_s}
    print(json.dumps(told))


WAYS = ("melld", "melld, events by vLLM", "vLLM")


def main() -> None:
    """Measure, print, record."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("rate", "gaps", "at-once"))
    parser.add_argument("streams", type=int, nargs="+")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    match arguments.what:
        case "rate":
            columns = ["engines x streams", "front", "tokens/s", "events/s", "µs a token", "µs an event"]
            columns.append("/health, p99, ms")
            rows = measure_rates(arguments.streams, arguments.ways, arguments.rounds)
            if arguments.write:
                record("front-costless", markdown(columns, rows), "2-core VM")
        case "gaps":
            columns = ["workers x streams", "step", "gap of a move, in steps", "gap of a kill, in steps"]
            rows = [row for each in arguments.streams for row in measure_gaps(each)]
            if arguments.write:
                record("front-gaps", markdown([*columns, "/health, p99, ms"], rows), "2-core VM")
        case _:
            for streams in arguments.streams:
                ask_at_once(streams)


if __name__ == "__main__":
    main()
