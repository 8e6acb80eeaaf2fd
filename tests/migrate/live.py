"""Streams through the HTTP API of a real daemon, and moves of them, for tests."""

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from melld.control.client import ControlClient
from melld.control.messages import AskStory, Migrate, Resume, Unload
from melld.migrate.snapshot import Via
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

CALM = ("ready", "asleep", "stopped")
STORY = [{"role": "user", "content": "Tell me the story of the old lighthouse and its keeper. " * 8}]
LONG = [{"role": "user", "content": "Tell me the story of the old lighthouse and its keeper. " * 110}]
"""A prompt of several chunks."""
LONGEST_PAUSE_S = 0.06
"""Between two looks at the status: one costs a millisecond of processor time."""
CHUNK_S = 0.25
"""How long a step lasts while such a prompt is followed: there is time to ask for its move."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 60},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
}
THOUGHT = "<think>", "</think>"
"""Signs of the daemon's `reasoning_config`: a thought begins in the prompt, and is ended when its budget is spent."""
SIGNS = '{{reasoning_start_str="{}", reasoning_end_str="{}"}}'.format(*THOUGHT)
THINKS = ("--set", f"model.vllm.reasoning_config={SIGNS}")
"""Flags of a daemon that is asked the case `thinking`."""
GREEDY: dict[str, Any] = {"messages": STORY, "max_tokens": 80, "temperature": 0, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.9, "top_p": 0.95, "seed": 11}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "long": {**GREEDY, "max_tokens": 160},
    "seeded": SEEDED,
    "penalties": {**SEEDED, "presence_penalty": 0.6, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "json_schema": {
        **SEEDED,
        "max_tokens": 240,
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    },
    "regex": {
        **SEEDED,
        "max_tokens": 240,
        "ignore_eos": False,
        "structured_outputs": {"regex": r"[a-f]{70,90}-[0-9]{10}"},
    },
    "n": {**SEEDED, "n": 3},
    "logprobs": {**SEEDED, "logprobs": True, "top_logprobs": 3},
    "min_tokens": {**SEEDED, "ignore_eos": False, "min_tokens": 50},
    "thinking": {
        **GREEDY,
        "messages": [{"role": "user", "content": STORY[0]["content"] + THOUGHT[0]}],
        "max_tokens": 160,
        "thinking_token_budget": 60,
    },
}


@dataclass
class Choice:
    """One choice's output as its client received it, joined."""

    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    prompt_logprobs: Any = None


@dataclass
class Answer:
    """Everything that a client received."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Any = None
    error: Any = None


def alike(one: Any, other: Any, tolerance: float) -> bool:
    """Return True if both are equal except for fractional numbers (log-probabilities), within a tolerance."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(alike(*pair, tolerance) for pair in zip(one, other, strict=True))
    return bool(one == other)


class Stream(threading.Thread):
    """One completion, streamed and read as it comes, or whole where the body says `stream: false`."""

    def __init__(self, daemon: DaemonProcess, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.id = ""
        self.answer = Answer()
        self.arrivals_s: list[float] = []
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        self._body = {"model": "demo", **(streamed if body.get("stream", True) else {}), **body}
        self._came = threading.Condition()
        self._left = False
        self._connection = http.client.HTTPConnection(urlsplit(daemon.url).netloc, timeout=PATIENCE_S)
        self.start()

    def run(self) -> None:
        with contextlib.closing(self._connection) as connection, self._unless_left():
            path = "/v1/completions" if "prompt" in self._body else "/v1/chat/completions"
            head = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(self._body), head)
            response = connection.getresponse()
            if response.status != 200:
                self.answer.error = (response.status, response.read())
            elif not self._body["stream"]:
                self._take(json.loads(response.read()))
            else:
                for line in response:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
                    if self._left:
                        connection.sock.close()
                        break
        with self._came:
            self._came.notify_all()

    def _take(self, chunk: dict[str, Any]) -> None:
        with self._came:
            self.arrivals_s.append(time.monotonic())
            self.id = chunk.get("id", self.id)
            if usage := chunk.get("usage"):  # what was cached depends on the worker, and is no part of an answer
                self.answer.usage = {name: usage[name] for name in usage if name != "prompt_tokens_details"}
            self.answer.error = chunk.get("error")
            for piece in chunk.get("choices", ()):
                choice = self.answer.choices.setdefault(piece["index"], Choice())
                delta = piece.get("delta") or piece.get("message") or {}
                choice.text += piece.get("text") or delta.get("content") or ""
                choice.logprobs += (piece.get("logprobs") or {}).get("content") or []
                choice.finish = piece.get("finish_reason") or choice.finish
                choice.prompt_logprobs = piece.get("prompt_logprobs") or choice.prompt_logprobs
            self._came.notify_all()

    @contextlib.contextmanager
    def _unless_left(self) -> Iterator[None]:
        try:
            yield
        except http.client.IncompleteRead:
            if not self._left:
                raise

    def leave(self) -> None:
        """Close the connection at the next chunk."""
        self._left = True

    def hang_up(self) -> None:
        """Reset the connection now, mid-silence, as the kernel does for a killed client."""
        self._left = True
        self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.sock.shutdown(socket.SHUT_RDWR)  # the reader wakes and closes it

    def wait_chunks(self, count: int) -> None:
        """Wait until that many have arrived, or the stream has ended."""
        with self._came:
            came = self._came.wait_for(lambda: len(self.arrivals_s) >= count or not self.is_alive(), PATIENCE_S)
        assert came, "the stream stands still"

    def result(self) -> Answer:
        """Return the whole answer."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), f"the stream hangs after {len(self.arrivals_s)} chunks"
        return self.answer


class Operator:
    """The daemon's control socket."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._client = ControlClient([daemon.runtime_directory], answer_s=PATIENCE_S)

    def status(self) -> Any:
        return msgspec.json.decode(self._client.status())

    def requests_of(self, stream: Stream) -> list[Any]:
        """Return the status of each of the stream's requests (several with n > 1)."""
        return [one for one in self.status()["requests"] if stream.id and stream.id in one["request"]]

    def migrate(self, request: str, worker: str, via: str | None, *, after_first_token: bool = False) -> Any:
        """Return the report.  Raises `ControlRefused` where the daemon would not."""
        way = Via(via) if via else None
        asked = Migrate(request=request, worker=worker, via=way, after_first_token=after_first_token)
        return msgspec.json.decode(self._client.operate("migrate", asked, PATIENCE_S))

    def story(self, request: str) -> Any:
        """Return what happened to the request so far."""
        return msgspec.json.decode(self._client.operate("why", AskStory(request=request), PATIENCE_S))

    def resume(self, worker: str) -> None:
        """Take the worker into service again."""
        self._client.operate("resume", Resume(worker=worker), PATIENCE_S)

    def unload(self, model: str) -> None:
        """Return once the model is in no worker's memory."""
        self._client.operate("unload", Unload(model=model), PATIENCE_S)

    def move(self, stream: Stream, via: str | None) -> list[Any]:
        """Move each of the stream's requests to the worker that it is not on; return the reports."""
        return [
            self.migrate(one["request"], "w1" if one["worker"] == "w0" else "w0", via)
            for one in self.requests_of(stream)
        ]

    def wait_ready(self, deadline_s: float = PATIENCE_S) -> None:
        """Wait until every worker is ready, or sleeps because nothing needs it."""
        self.wait(lambda status: all(worker["state"] in CALM for worker in status["workers"]), deadline_s)

    def wait_gone(self, worker: str, pid: int) -> None:
        """Wait until the daemon knows that this process of the worker has ended."""
        self.wait(lambda status: (worker, pid) not in {(w["worker"], w["pid"]) for w in status["workers"]}, PATIENCE_S)

    def wait_linked(self, daemon: DaemonProcess) -> None:
        """Wait until KV can be copied both ways between both workers, by the log."""
        while sum("KV from" in line and " by " in line for line in daemon.lines) < 2:  # perhaps before it was ready
            daemon.wait_for("KV from")

    def wait_request(self, matches: Callable[[Any], Any]) -> Any:
        """Return the first request whose status matches, once there is one."""
        self.wait(lambda status: any(matches(one) for one in status["requests"]), PATIENCE_S)
        return next(one for one in self.status()["requests"] if matches(one))

    def wait_idle(self, deadline_s: float = PATIENCE_S) -> None:
        """Wait until nothing runs and every block of every worker is free."""
        self.wait(
            lambda status: (
                not status["requests"]
                and not any(worker["used_blocks"] or worker["reserved_blocks"] for worker in status["workers"])
            ),
            deadline_s,
        )

    def wait(self, holds: Any, deadline_s: float = PATIENCE_S) -> None:
        """Wait until this holds of the status."""
        end_s, pause_s = time.monotonic() + deadline_s, 0.01
        while not holds(status := self.status()):
            assert time.monotonic() < end_s, status
            time.sleep(pause_s)  # another process: asking it is the only way to know
            pause_s = min(1.3 * pause_s, LONGEST_PAUSE_S)


@contextlib.contextmanager
def linked_workers(model: Path, *flags: str) -> Iterator[DaemonProcess]:
    """A daemon of two workers, both always in use, once KV can be copied both ways between them."""
    spread = ("--device", "cpu:2", "--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
    spread += ("--kv-bytes", "32MiB")
    with DaemonProcess(model, *spread, *flags, harmable=True) as process:
        process.wait_ready()
        Operator(process).wait_linked(process)
        yield process


class Bench:
    """A daemon, and its answers when nothing moves."""

    def __init__(self, daemon: DaemonProcess, faults: Path) -> None:
        self.daemon = daemon
        self.faults = faults
        self.operator = Operator(daemon)
        self._unmoved: dict[str, Answer] = {}

    def unmoved(self, name: str) -> Answer:
        """Return this case's undisturbed answer."""
        self.learn([name])
        return self._unmoved[name]

    def learn(self, names: Iterable[str]) -> None:
        """Ask for those of these answers that are not known yet, all at once."""
        streams = {name: Stream(self.daemon, self.body(name)) for name in names if name not in self._unmoved}
        self._unmoved |= {name: stream.result() for name, stream in streams.items()}

    def body(self, name: str) -> dict[str, Any]:
        """Return the case; its stop string is taken from the answer without one."""
        if name == "long prompt":
            return {**GREEDY, "messages": LONG, "max_tokens": 60}
        if name == "stop":
            text = self.unmoved("greedy").choices[0].text
            return {**GREEDY, "stop": [text[int(len(text) * 0.8) :][:6]]}
        return CASES[name]

    def slowed(self) -> contextlib.AbstractContextManager[None]:
        """Within it, nothing completes before it is looked at."""
        return slowed(self.faults)

    def stream(self, name: str) -> Stream:
        """Return a run of the case that has begun to answer."""
        stream = Stream(self.daemon, self.body(name))
        stream.wait_chunks(12)
        return stream

    def seen_prefilling(self, body: dict[str, Any], salt: str) -> tuple[Stream, dict[str, Any]]:
        """Return a run of `body` that was just seen to prefill, and its row in the status.

        A quick machine may be past the prompt before it is looked at; each try has a prompt that no cache knows.
        """
        for attempt in range(20):
            stream = Stream(self.daemon, body | {"cache_salt": f"{salt} {attempt}"})
            while stream.is_alive():
                if running := [one for one in self.operator.status()["requests"] if one["phase"] == "prefilling"]:
                    return stream, running[0]
        raise AssertionError("every prompt was over before anybody could look")
