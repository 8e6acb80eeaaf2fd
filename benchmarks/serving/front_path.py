"""What a token costs on its way out: processor time of melld's daemon and of vLLM's API server, in turns, in one run.

    .venv/bin/python -m benchmarks.serving.front_path [KIND...] [--rounds 3] [--streams 64] [--write]

Both servers are up at once, each with one worker and the same model, and only one is asked at a time, A B A B ....
Counted is what /proc tells of the one process in front of the workers, divided by the tokens that it sent, and by its
events: a server that is behind puts several tokens into one.  Wall time does not count, so that a busy machine does
little harm; the ratio of each pair is given as median (lowest .. highest).  The client only looks at its connections
now and then: one that waits on this machine is woken by the server's write, which pays for that.
"""

import contextlib
import json
import os
import re
import socket
import statistics
import tempfile
import time
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


class Answers(NamedTuple):
    """What a server has answered, and what that has cost it."""

    tokens: int
    events: int
    cpu_s: float

    @property
    def token_s(self) -> float:
        """Return the processor time of a token."""
        return self.cpu_s / self.tokens

    @property
    def event_s(self) -> float:
        """Return the processor time of an event; a whole answer is one."""
        return self.cpu_s / self.events


def ask_all(url: str, kind: Kind, streams: int) -> list[bytes]:
    """Ask so many at once; return the answers.  Each has a seed of its own."""
    address = urlsplit(url)
    waiting: dict[socket.socket, bytearray] = {}
    for seed in range(streams):
        connection = socket.create_connection((address.hostname, address.port))
        connection.sendall(asked(address.netloc, kind, seed))
        connection.setblocking(False)
        waiting[connection] = bytearray()
    answers = []
    while waiting:
        time.sleep(LOOK_EVERY_S)
        for connection in list(waiting):
            while (piece := received(connection)) is not None:
                waiting[connection] += piece
                if not piece:
                    answers.append(bytes(waiting.pop(connection)))
                    connection.close()
                    break
    return answers


def asked(host: str, kind: Kind, seed: int, name: str = "stream") -> bytes:
    """Return a request, whose id has this name and its seed."""
    body = json.dumps({**kind.body, "model": "demo", "seed": seed, "temperature": 1.0}).encode()
    head = f"POST /v1/{kind.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"X-Request-Id: {name}{seed}-\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


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

    def ask(self, kind: Kind, streams: int) -> Answers:
        """Ask so many at once, and return what that has cost."""
        began_s = processor_s(self.pid)
        answers = ask_all(self.url, kind, streams)
        cpu_s = processor_s(self.pid) - began_s
        return Answers(sum(map(tokens_in, answers)), sum(max(1, one.count(b"data: ")) for one in answers), cpu_s)


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


def measure(names: list[str], rounds: int, streams: int) -> Iterator[list[list[str]]]:
    """Measure each kind in turns; yield the rows of the table after each."""
    rows = []
    for options in (PLAIN, TOOLS, REASONING):
        chosen = [name for name in names if KINDS[name].options is options]
        if not chosen:
            continue
        with both(options) as (ours, theirs):
            for name in chosen:
                kind = KINDS[name]
                for server in (ours, theirs):
                    server.ask(kind, 8)  # warmed up
                pairs = [(ours.ask(kind, streams), theirs.ask(kind, streams)) for _ in range(rounds)]
                rows.append([name, str(streams)])
                for cost in (lambda one: one.token_s, lambda one: one.event_s):
                    costs = [(cost(one), cost(other)) for one, other in pairs]
                    rows[-1] += [f"{statistics.median(pair[side] for pair in costs) * 1e6:.0f}" for side in (0, 1)]
                    ratios = [one / other for one, other in costs]
                    rows[-1].append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")
                print(*rows[-1], sep=" | ", flush=True)
                yield rows


def main() -> None:
    """Measure, print, record."""
    parser = harness.parser_of(__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    arguments = parser.parse_args()
    per = [f"{whose}, µs {what}" for what in ("a token", "an event") for whose in ("melld", "vLLM")]
    columns = ["kind", "streams", *per[:2], "melld / vLLM, a token", *per[2:], "melld / vLLM, an event"]
    for rows in measure(arguments.kinds or list(KINDS), arguments.rounds, arguments.streams):
        if arguments.write:
            harness.record("front-path", harness.markdown(columns, rows), "2-core VM")


if __name__ == "__main__":
    main()
