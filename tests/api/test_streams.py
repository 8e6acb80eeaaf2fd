"""Streams whose readers are slow, gone, or outlived by the daemon."""

import asyncio
import json
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from melld.api.admission import Admission, Door
from melld.api.answers import Answer, Dialect, Refusal
from melld.daemon.metrics import LoopProbe
from tests.api.http_client import API_KEY, CHAT, chat, completion, connect, head, post, request, talk
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess

LONG = {"max_tokens": 16_000, "stream": True, "ignore_eos": True}


def metric(daemon: DaemonProcess, name: str) -> float:
    """The sum of a metric's series."""
    text = request(daemon.url, "GET", "/metrics").body.decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def completed(daemon: DaemonProcess) -> float:
    """Return how many requests received every token that they asked for."""
    text = request(daemon.url, "GET", "/metrics").body.decode()
    found = re.findall(r'^vllm:request_success_total{[^}]*finished_reason="length"[^}]*} (\S+)$', text, re.MULTILINE)
    assert found
    return sum(map(float, found))


def until(condition: Callable[[], bool], deadline_s: float = PATIENCE_S) -> None:
    """Ask again, over HTTP or by reading a socket, until the condition holds."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "it has not come to hold"
        time.sleep(0.02)  # another process: asking it is the only way to know


def begun(connection: socket.socket) -> bytes:
    """Return the first bytes of a stream."""
    first = connection.recv(65536)
    assert first.startswith(b"HTTP/1.1 200"), first
    return first


def test_a_reader_that_takes_nothing_is_cut_off_and_harms_nobody(strict: DaemonProcess) -> None:
    """One stuck client must not hold an engine's memory forever, nor slow down the others."""
    before = metric(strict, "melld_http_slow_readers_total")
    with connect(strict.url, receive_bytes=4096) as connection:
        connection.sendall(post(chat(**LONG | {"logprobs": True, "top_logprobs": 20})))
        begun(connection)
        until(lambda: request(strict.url, "POST", CHAT, chat()).status == 200)
        until(lambda: metric(strict, "melld_http_slow_readers_total") == before + 1)
        until(lambda: metric(strict, "melld_http_calls_in_flight") == 0)
        rest = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b"[DONE]" not in rest
        assert len(rest) < 2_000_000


def test_a_slow_reader_is_served_to_the_end(strict: DaemonProcess) -> None:
    """Slowness alone is no offence: twice the time limit passes here."""
    before = metric(strict, "melld_http_slow_readers_total")
    with connect(strict.url, receive_bytes=4096) as connection:
        connection.sendall(post(chat(max_tokens=500, stream=True, ignore_eos=True, logprobs=True, top_logprobs=20)))
        received = begun(connection)
        began_s = time.monotonic()
        while piece := connection.recv(6144):
            received += piece
            if time.monotonic() - began_s < 3.0:
                time.sleep(0.05)  # what is tested is a reader of this speed
    assert metric(strict, "melld_http_slow_readers_total") == before, strict.lines[-3:]
    assert b"data: [DONE]" in received


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_engine_at_once(strict: DaemonProcess, path: str, streamed: bool) -> None:
    """A closed connection gets no compute and is not counted as a bad request, streaming or not."""
    refusals = f'melld_http_answers_total{{route="{path}",status="[45].."}}'
    left, refused = metric(strict, "melld_http_disconnects_total"), metric(strict, refusals)
    body: dict[str, Any] = {"model": "demo", "stream": streamed, "max_tokens": 16_000, "ignore_eos": True}
    text = "Hello " * 5
    if path == "/v1/completions":
        body["prompt"] = text
    elif path == "/v1/responses":
        body |= {"input": text, "max_output_tokens": 16_000}
    else:
        body["messages"] = [{"role": "user", "content": text}]
    before = completed(strict)
    with connect(strict.url) as connection:
        connection.sendall(post(body, path))
        until(lambda: bool(strict.status()["requests"]))
    until(lambda: metric(strict, "melld_http_calls_in_flight") == 0)
    until(lambda: strict.status()["requests"] == [])
    until(lambda: metric(strict, "melld_http_disconnects_total") == left + 1)
    assert metric(strict, refusals) == refused
    assert completed(strict) == before


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_over_http_1_0_ends_with_its_connection(strict: DaemonProcess, path: str) -> None:
    """A proxy or old client that keeps the connection would wait for more after the last event."""
    asked = {"/v1/completions": completion(), "/v1/responses": {"input": "x", "max_output_tokens": 4}}
    sent = post(asked.get(path, chat()) | {"stream": True}, path)
    sent = sent.replace(b" HTTP/1.1", b" HTTP/1.0", 1).replace(b"Connection: close", b"Connection: keep-alive", 1)
    answer = talk(strict.url, sent)
    assert answer.startswith(b"HTTP/1.0 200"), answer
    assert b"keep-alive" not in answer


def test_a_connection_is_kept_for_the_next_request(strict: DaemonProcess) -> None:
    """Clients with a pool pay for one connection."""
    body = json.dumps(chat()).encode()
    sent = head(f"Content-Length: {len(body)}").replace(b"Connection: close\r\n", b"") + body
    with connect(strict.url) as connection:
        for _ in range(3):
            connection.sendall(sent)
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200"), answer


def test_the_last_signal_notifies_every_client(demo_model: Path, tmp_path: Path) -> None:
    """A second SIGTERM ends the daemon now: streams get an error event, calls a 503, none is cut off silently."""
    with DaemonProcess(demo_model, "--device", "cpu:1", "--set", "server.drain_s=60") as daemon:
        daemon.wait_ready()
        with connect(daemon.url) as stream, connect(daemon.url) as whole, connect(daemon.url) as messages:
            stream.sendall(post(chat(**LONG)))
            messages.sendall(post(chat(max_tokens=16_000, stream=True), "/v1/messages"))
            whole.sendall(post(chat(max_tokens=16_000, ignore_eos=True)))
            begun(stream)
            begun(messages)
            until(lambda: len(daemon.status()["requests"]) == 3)
            daemon.process.send_signal(signal.SIGTERM)
            until(lambda: request(daemon.url, "GET", "/ready").status == 503)
            late = request(daemon.url, "POST", CHAT, chat())
            assert late.status == 503
            assert int(late.headers["retry-after"]) >= 1
            assert request(daemon.url, "GET", "/health").status == 200
            daemon.process.send_signal(signal.SIGTERM)
            told = b"".join(iter(lambda: stream.recv(65536), b""))
            assert b'event: error\ndata: {"error"' in told
            assert told.rstrip(b"\r\n0").endswith(b"data: [DONE]")
            told = b"".join(iter(lambda: messages.recv(65536), b""))
            assert b'event: error\ndata: {"type": "error"' in told
            assert b"HTTP/1.1 503" in b"".join(iter(lambda: whole.recv(65536), b""))
        assert daemon.wait_end() == 0


class TestAdmission:
    async def test_the_door_counts_waits_and_closes(self) -> None:
        """A drain ends when the last call has gone, and not before."""
        admission = Admission(lambda: 1, lambda: None)
        leave = asyncio.Event()

        async def call() -> None:
            with admission.call():
                await leave.wait()

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        assert admission.in_flight == 1
        with pytest.raises(Refusal) as full:
            admission.check()
        assert full.value.answer.status == 429
        admission.begin_drain()
        assert admission.why_closed() == "draining"
        with pytest.raises(Refusal) as closed, admission.call():
            pass
        assert closed.value.answer.status == 503
        assert not await admission.wait_idle(0.01)
        leave.set()
        assert await admission.wait_idle(5)
        await task
        assert admission.door is Door.DRAINING

    async def test_an_abort_ends_every_call(self) -> None:
        """Nothing outlives it."""
        admission = Admission(lambda: 2, lambda: None)

        async def call() -> None:
            with admission.call():
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(call()) for _ in range(2)]
        await asyncio.sleep(0)
        assert admission.abort() == 2
        assert await admission.wait_idle(5)
        assert await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.aborted

    async def test_a_daemon_that_is_not_ready_admits_nobody(self) -> None:
        """Clients retry while a worker starts; connections do not wait for it."""
        why: list[str | None] = ["starting"]
        admission = Admission(lambda: 2, lambda: why[0])
        with pytest.raises(Refusal, match="starting"):
            admission.check()
        why[0] = None
        admission.check()


async def test_the_probe_sees_a_blocked_loop() -> None:
    """What stalls every stream at once must show in the metrics."""
    registry = prometheus_client.CollectorRegistry()
    probe = LoopProbe(registry)
    await asyncio.sleep(0.1)
    time.sleep(0.15)  # noqa: ASYNC251 - blocking the loop is what is to be seen
    await asyncio.sleep(0.1)
    assert probe.max_delay_s() > 0.05
    assert registry.get_sample_value("melld_event_loop_tasks") == len(asyncio.all_tasks())
    probe.stop()
    assert registry.get_sample_value("melld_event_loop_delay_max_seconds") == probe.max_delay_s()
    counted = registry.get_sample_value("melld_event_loop_delay_seconds_count")
    assert counted is not None
    assert counted >= 2
    slow = registry.get_sample_value("melld_event_loop_delay_seconds_bucket", {"le": "0.05"})
    assert slow is not None
    assert slow < counted


@pytest.mark.parametrize("dialect", Dialect)
def test_an_error_in_a_stream_is_an_event_in_each_dialect(dialect: Dialect) -> None:
    """Each client's parser finds the error where it looks for it."""
    event = Answer(500, "broken", code="c").event(dialect, 7).decode()
    assert event.startswith("event: error\ndata: ")
    fields = json.loads(event.splitlines()[1].removeprefix("data: "))
    if dialect is Dialect.OPENAI:
        assert fields == {"error": {"message": "broken", "type": "server_error", "param": None, "code": "c"}}
        assert event.endswith("data: [DONE]\n\n")
    elif dialect is Dialect.RESPONSES:
        wanted = {"type": "error", "code": "c", "message": "broken", "param": None, "sequence_number": 7}
        assert fields == wanted
    else:
        assert fields == {"type": "error", "error": {"type": "api_error", "message": "broken"}}


def test_the_metrics_need_the_key(strict: DaemonProcess) -> None:
    """They tell who asks for what, so they are not for everybody."""
    assert request(strict.url, "GET", "/metrics", headers={"Authorization": f"Bearer {API_KEY}x"}).status == 401
