"""What a token costs on its way out: processor time of melld's daemon and of vLLM's API server, in turns, in one run.

    .venv/bin/python -m benchmarks.serving.front_path [KIND...] [--rounds 3] [--streams 64] [--write NAME]
    .venv/bin/python -m benchmarks.serving.front_path --costless 64 256 [--write NAME]

Both servers are up at once, each with one worker and the same model, and only one is asked at a time, A B A B ....
Counted is what /proc tells of the one process in front of the workers, divided by the tokens that it sent.  Wall time
does not count, so that a busy machine does little harm; the ratio of each pair is given as median (lowest .. highest).
The client only looks at its connections now and then: one that waits on this machine is woken by the server's write,
which pays for that.  `--costless`: what one daemon delivers of eight workers that compute nothing.
"""

import contextlib
import json
import os
import re
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks import harness
from benchmarks.harness import CPU
from benchmarks.serving.answers_vs_vllm import flags_for_melld, flags_for_vllm
from benchmarks.serving.serve_vs_vllm import vllm_serve
from melld.demo_model import make_demo_model
from tests.serve.daemon_process import DaemonProcess

TOKENS_OUT = 200
LOOK_EVERY_S = 0.05
WORKERS = 8
LONG_TOKENS_OUT = 300
LONG_PROMPT_TOKENS = 4000
PLAIN: dict[str, Any] = {}
TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
REASONING = {"reasoning_parser": "qwen3"}
USED = re.compile(rb'"(?:completion|output)_tokens": ?(\d+)')
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


class Kind(NamedTuple):
    """A kind of answer: what both servers are started with, and what they are asked."""

    options: dict[str, Any]
    path: str
    body: dict[str, Any]


def chat(**more: Any) -> dict[str, Any]:
    """Return a chat that is streamed and tells its usage."""
    asked = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": TOKENS_OUT, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": "Tell me a story."}], **asked, **more}


def said(text: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


USAGE = {"include_usage": True}
KINDS = {
    "chat": Kind(PLAIN, "chat/completions", chat()),
    "completions": Kind(
        PLAIN,
        "completions",
        {"prompt": "Once", "stream": True, "stream_options": USAGE, "max_tokens": TOKENS_OUT, "ignore_eos": True},
    ),
    "messages": Kind(PLAIN, "messages", {"messages": said("Tell."), "stream": True, "max_tokens": TOKENS_OUT}),
    "responses": Kind(
        PLAIN, "responses", {"input": "Tell.", "stream": True, "max_output_tokens": TOKENS_OUT, "ignore_eos": True}
    ),
    "logprobs": Kind(PLAIN, "chat/completions", chat(logprobs=True, top_logprobs=2)),
    "whole": Kind(PLAIN, "chat/completions", chat(stream=False, stream_options=None)),
    "long prompts": Kind(
        PLAIN, "chat/completions", chat(messages=said("a story " * (LONG_PROMPT_TOKENS // 3)), max_tokens=50)
    ),
    "reasoning": Kind(REASONING, "chat/completions", chat()),
    "tools": Kind(TOOLS, "chat/completions", chat(tools=[{"type": "function", "function": WEATHER}])),
    "tools unused": Kind(TOOLS, "chat/completions", chat()),
}


def ask_all(url: str, kind: Kind, streams: int) -> int:
    """Ask so many at once; return how many tokens were answered.  Each has a seed of its own."""
    address = urlsplit(url)
    waiting: dict[socket.socket, bytes] = {}
    for seed in range(streams):
        body = json.dumps({**kind.body, "model": "demo", "seed": seed, "temperature": 1.0}).encode()
        head = f"POST /v1/{kind.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection((address.hostname, address.port))
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.setblocking(False)
        waiting[connection] = b""
    answers = []
    while waiting:
        time.sleep(LOOK_EVERY_S)
        for connection in list(waiting):
            while (piece := received(connection)) is not None:
                waiting[connection] += piece
                if not piece:
                    answers.append(waiting.pop(connection))
                    connection.close()
                    break
    return sum(tokens_in(answer) for answer in answers)


def received(connection: socket.socket) -> bytes | None:
    """Return what has come, b"" at the end, or None if nothing has."""
    try:
        return connection.recv(1 << 20)
    except BlockingIOError:
        return None


def tokens_in(answer: bytes) -> int:
    """Return how many tokens an answer says that it has."""
    if not answer.startswith(b"HTTP/1.1 200") or not (used := USED.findall(answer)):
        raise SystemExit(f"no answer with its usage: {answer[:600]!r}")
    return int(used[-1])


def processor_s(pid: int) -> float:
    """Return the processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Server(NamedTuple):
    """Who is asked, and which process is in front of its workers."""

    url: str
    pid: int

    def cost_s(self, kind: Kind, streams: int) -> float:
        """Return the processor time of one token of this kind, in seconds."""
        began_s = processor_s(self.pid)
        tokens = ask_all(self.url, kind, streams)
        return (processor_s(self.pid) - began_s) / tokens


@contextlib.contextmanager
def both(options: dict[str, Any]) -> Iterator[tuple[Server, Server]]:
    """Start melld and `vllm serve` with one CPU worker each."""
    with tempfile.TemporaryDirectory() as name:
        directory, model = Path(name), Path(name) / "demo"
        make_demo_model(model)
        flags = (*CPU.serve_flags(1), *flags_for_melld(options))
        with (
            vllm_serve(model, directory, *flags_for_vllm(options)) as theirs,
            DaemonProcess(model, *flags, genuine=True) as daemon,
        ):
            ours = daemon.wait_ready().url
            yield Server(ours, daemon.process.pid), Server(theirs, listener(theirs))


def listener(url: str) -> int:
    """Return the process that listens at a URL of this machine."""
    port = urlsplit(url).port
    (inode,) = (
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    )
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) == f"socket:[{inode}]":
                return int(descriptor.parts[2])
    raise SystemExit(f"nobody listens at {url}")


def measure(names: list[str], rounds: int, streams: int) -> list[list[str]]:
    """Measure each kind in turns; return the rows of the table."""
    rows = []
    for options in (PLAIN, TOOLS, REASONING):
        chosen = [name for name in names if KINDS[name].options is options]
        if not chosen:
            continue
        with both(options) as (ours, theirs):
            for name in chosen:
                kind = KINDS[name]
                for server in (ours, theirs):
                    server.cost_s(kind, 8)  # warmed up
                pairs = [(ours.cost_s(kind, streams), theirs.cost_s(kind, streams)) for _ in range(rounds)]
                ratios = [one / other for one, other in pairs]
                ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
                costs = [f"{statistics.median(pair[side] for pair in pairs) * 1e6:.0f}" for side in (0, 1)]
                rows.append([name, str(streams), *costs, ratio])
                print(*rows[-1], sep=" | ", flush=True)
    return rows


def measure_costless(streams_each: list[int]) -> list[list[str]]:
    """Measure eight workers that cost nothing, with events written at once and with all made by vLLM, in turns."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        make_demo_model(Path(name) / "demo")
        flags = (
            "--device",
            f"cpu:{WORKERS}",
            "--set",
            'scheduler.policy="most-free"',
            "--set",
            "idle.sleep_after_s=inf",
        )
        for each in streams_each:
            for way, words in (("written at once", ()), ("made by vLLM", ("--whole",))):
                program = ("-m", "benchmarks.costless", *words)
                with DaemonProcess(Path(name) / "demo", *flags, genuine=True, program=program) as daemon:
                    url = daemon.wait_ready().url
                    rows.append([f"{WORKERS} x {each}", way, *rate(Server(url, daemon.process.pid), WORKERS * each)])
                    print(*rows[-1], sep=" | ", flush=True)
    return rows


def rate(server: Server, streams: int) -> list[str]:
    """Return tokens a second, processor time a token, tokens a second and core, and how late `/health` is meanwhile."""
    kind = Kind(PLAIN, "chat/completions", chat(max_tokens=LONG_TOKENS_OUT))
    ask_all(server.url, kind, WORKERS)
    delays_s: list[float] = []
    over = threading.Event()
    asking = threading.Thread(target=ask_health, args=(server.url, over, delays_s))
    asking.start()
    began_s, began_cpu_s = time.monotonic(), processor_s(server.pid)
    tokens = ask_all(server.url, kind, streams)
    took_s, cpu_s = time.monotonic() - began_s, processor_s(server.pid) - began_cpu_s
    over.set()
    asking.join()
    late_s = statistics.quantiles(delays_s, n=100)[98]
    return [f"{tokens / took_s:,.0f}", f"{cpu_s / tokens * 1e6:.1f}", f"{tokens / cpu_s:,.0f}", f"{late_s * 1e3:.0f}"]


def ask_health(url: str, over: threading.Event, delays_s: list[float]) -> None:
    """Ask for `/health` twenty times a second."""
    while not over.wait(0.05):
        began_s = time.monotonic()
        with urllib.request.urlopen(url + "/health", timeout=60) as answer:
            answer.read()
        delays_s.append(time.monotonic() - began_s)


def main() -> None:
    """Measure, print, record."""
    parser = harness.parser_of(__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--costless", type=int, nargs="+", metavar="STREAMS", help="of each of eight costless workers")
    arguments = parser.parse_args()
    if arguments.costless:
        columns = ["workers x streams", "events", "tokens/s", "µs a token", "tokens/s and core", "/health, p99, ms"]
        rows = measure_costless(arguments.costless)
    else:
        columns = ["kind", "streams", "melld, µs a token", "vLLM, µs a token", "melld / vLLM"]
        rows = measure(arguments.kinds or list(KINDS), arguments.rounds, arguments.streams)
    if arguments.write:
        name = "front-path-costless" if arguments.costless else "front-path"
        harness.record(name, harness.markdown(columns, rows), "2-core VM")


if __name__ == "__main__":
    main()
