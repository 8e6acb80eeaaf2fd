"""A worker's wire: one request's cost or failure does not affect others, and pings are always answered."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from melld.engine.wire import messages as wire
from melld.engine.worker.migration_book import Book
from melld.engine.worker.preparer import Preparer
from melld.engine.worker.reader import Pulse, read
from melld.engine.worker.requests import Admitted, ReadyToResume, Requests
from melld.engine.worker.writer import write_frame
from melld.ids import NO_EVENT
from melld.migrate import messages as say
from melld.migrate.snapshot import MoveRefusal, MoveRefused, Via
from tests.patience import PATIENCE_S

PONG = wire.Pong(busy_s=0.0)
WireUp = Callable[[Callable[..., Any]], "Wired"]


def made(_core_request: bytes) -> Any:
    """Return an `Arrival` without a grammar."""
    return SimpleNamespace(request=SimpleNamespace(request_id="r1"), compiling=None)


class Wired:
    """Both of a worker's threads on one end of a socket; the test has the other.  vLLM's part is `prepare`."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        self._daemon, self._worker = socket.socketpair()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.aborts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        engine: Any = SimpleNamespace(aborts_queue=self.aborts)
        residency: Any = SimpleNamespace(prepare=prepare, complete=lambda arrival, _tokens: arrival)
        line: queue.SimpleQueue[Any] = queue.SimpleQueue()
        preparer = Preparer(line, residency, self.inbox, self.said.put)
        self.pulse = Pulse()
        told = self._worker, engine, line, self.said.put, self.pulse.pong, threading.Event()
        self._reading = threading.Thread(target=read, args=told)
        self._reading.start()
        threading.Thread(target=preparer.run, daemon=True).start()

    def send(self, message: msgspec.Struct, *payload: bytes) -> None:
        write_frame(self._daemon, message, payload)

    def close(self) -> None:
        self._daemon.close()
        self._reading.join()
        self._worker.close()


@pytest.fixture
def wired_to(monkeypatch: pytest.MonkeyPatch) -> Iterator[WireUp]:
    """Return such a pair; unlike a worker, the test process does not end with its wire."""
    monkeypatch.setattr(os, "_exit", lambda _code: None)
    with contextlib.ExitStack() as stack:

        def wire_up(prepare: Callable[..., Any]) -> Wired:
            wired = Wired(prepare)
            stack.callback(wired.close)
            return wired

        yield wire_up


def test_a_ping_is_answered_while_a_request_takes_long_to_prepare(wired_to: WireUp) -> None:
    """A grammar that compiles for a minute does not get its worker killed as hung."""
    compiled = threading.Event()

    def compile_slowly(core_request: bytes) -> Any:
        assert compiled.wait(PATIENCE_S)
        return made(core_request)

    wired = wired_to(compile_slowly)
    wired.send(wire.AddRequest(request="slow", lease=1), b"")
    wired.send(wire.Ping(time.monotonic()))
    assert wired.said.get(timeout=PATIENCE_S) == PONG
    assert wired.inbox.empty()
    compiled.set()
    assert isinstance(wired.inbox.get(timeout=PATIENCE_S), Admitted)


def test_a_worker_knows_the_daemon_s_time(wired_to: WireUp) -> None:
    """Even on another machine with a different monotonic clock: arrivals use the daemon's."""
    wired, begun_s, daemon_s = wired_to(made), time.monotonic(), 1e6
    wired.send(wire.Ping(daemon_s))
    assert wired.said.get(timeout=PATIENCE_S) == PONG
    now_s = wired.pulse.daemon_s()
    assert daemon_s <= now_s <= daemon_s + time.monotonic() - begun_s


def test_messages_reach_the_engine_in_order(wired_to: WireUp) -> None:
    """An abort never overtakes the request that it is about."""
    wired = wired_to(made)
    wired.send(wire.AddRequest(request="r1", lease=1), b"")
    abort = wire.AbortRequests(requests=["r1"])
    wired.send(abort)
    assert isinstance(wired.inbox.get(timeout=PATIENCE_S), Admitted)
    assert wired.inbox.get(timeout=PATIENCE_S) == abort


def test_a_running_step_hears_only_of_final_departures(wired_to: WireUp) -> None:
    """A step that hears late would abort a suspended request that has come back."""
    wired = wired_to(made)
    for abort in (wire.AbortRequests(["back"], may_return=True), wire.AbortRequests(["gone"])):
        wired.send(abort)
        assert wired.inbox.get(timeout=PATIENCE_S) == abort
    assert (wired.aborts.get_nowait(), wired.aborts.empty()) == (["gone"], True)


def test_a_request_that_cannot_be_prepared_is_rejected_alone(wired_to: WireUp) -> None:
    """Whatever vLLM raises, and whatever the payload holds: its client hears of it, and the worker reads on."""

    def refuse(_core_request: bytes) -> Any:
        raise RuntimeError("no such grammar")

    wired = wired_to(refuse)
    wired.send(wire.AddRequest(request="r1", lease=1, cause=7), b"no request")
    rejected = wire.RequestRejected(request="r1", reason="RuntimeError: no such grammar", cause=7)
    assert wired.said.get(timeout=PATIENCE_S) == rejected
    wired.send(wire.ResumeRequest(request="r2", lease=1), b"no request")
    assert isinstance(wired.said.get(timeout=PATIENCE_S), wire.RequestTaken)
    assert wired.said.get(timeout=PATIENCE_S).request == "r2"
    wired.send(wire.StopWorker())
    assert wired.inbox.get(timeout=PATIENCE_S) == wire.StopWorker()


def test_a_request_without_its_adapter_is_rejected_with_its_cause(wired_to: WireUp) -> None:
    """The daemon's log leads from the refusal to the event that placed it."""

    def refuse(_request: Any) -> None:
        raise MoveRefused("r1", MoveRefusal.LORA_ABSENT)

    wired = wired_to(made)
    wired.send(wire.AddRequest(request="r1", lease=0, cause=7), b"")
    unable, nobody = cast("Any", SimpleNamespace(admit=refuse)), cast("Any", None)
    Requests(unable, nobody, nobody, wired.said.put).admit(wired.inbox.get(timeout=PATIENCE_S))
    reason = MoveRefusal.LORA_ABSENT.value
    assert wired.said.get(timeout=PATIENCE_S) == wire.RequestRejected(request="r1", reason=reason, cause=7)


def test_a_move_that_cannot_be_prepared_is_refused(wired_to: WireUp) -> None:
    """Whatever was raised, only that move fails: its request goes on where it is."""

    def fail(_core_request: bytes) -> Any:
        raise ValueError("not like this")

    wired = wired_to(fail)
    reserve = say.ReserveBlocks(move=1, number=1, request="r1", cause=7, token_capacity=1)
    wired.send(reserve, b"", msgspec.msgpack.encode([7]))
    failed = wired.said.get(timeout=PATIENCE_S)
    assert isinstance(failed, say.CommandFailed)
    assert (failed.reason, failed.cause) == ("not like this", 7)
    attach = say.AttachRequest(move=1, number=2, request="r1", source="w0", via=Via.KV, lease=1)
    wired.send(attach, b"no snapshot")
    assert wired.said.get(timeout=PATIENCE_S).number == 2


class Compiling:
    """vLLM's part for requests whose grammars compile until the test says otherwise, by encoded request."""

    def __init__(self) -> None:
        self.grammars: dict[bytes, Future[None]] = {}

    def prepare(self, core_request: bytes) -> Any:
        grammar = self.grammars[core_request] = Future()
        return SimpleNamespace(compiling=grammar, core_request=core_request)


def test_no_request_waits_for_another_s_grammar(wired_to: WireUp) -> None:
    """Nor does a cancellation: until it is heard, copies are made for nobody."""
    vllm = Compiling()
    wired = wired_to(vllm.prepare)
    tokens = msgspec.msgpack.encode([7])
    reserve = say.ReserveBlocks(move=1, number=1, request="structured", token_capacity=1)
    cancel = say.CancelReservation(move=2, number=5, request="other", lease=1)
    wired.send(reserve, b"structured", tokens)
    wired.send(cancel)
    assert wired.inbox.get(timeout=PATIENCE_S) == cancel
    vllm.grammars[b"structured"].set_result(None)
    assert wired.inbox.get(timeout=PATIENCE_S).command == reserve


@pytest.mark.parametrize(
    "end", [wire.AbortRequests(["r1"]), say.CancelReservation(move=1, number=2, request="r1", lease=1)]
)
def test_a_request_that_leaves_while_its_grammar_compiles_is_not_added(wired_to: WireUp, end: msgspec.Struct) -> None:
    """It would hold its blocks forever; and one that returns is added once."""
    vllm = Compiling()
    wired = wired_to(vllm.prepare)
    tokens = msgspec.msgpack.encode([7])
    wired.send(say.ReserveBlocks(move=1, number=1, request="r1", token_capacity=1), b"first", tokens)
    wired.send(end)
    wired.send(wire.ResumeRequest(request="r1", lease=2), b"again", tokens)
    assert wired.inbox.get(timeout=PATIENCE_S) == end
    assert isinstance(wired.said.get(timeout=PATIENCE_S), wire.RequestTaken)
    wired.send(wire.StopWorker())
    assert wired.inbox.get(timeout=PATIENCE_S) == wire.StopWorker()
    for grammar in vllm.grammars.values():
        grammar.set_result(None)
    assert wired.inbox.get(timeout=PATIENCE_S).lease == 2
    wired.send(wire.StopWorker())
    assert wired.inbox.get(timeout=PATIENCE_S) == wire.StopWorker()


def test_a_late_cancellation_of_a_move_spares_a_returned_request(wired_to: WireUp) -> None:
    """Its answer delayed by a long step, it is repeated after the request resumed here, its source having died."""
    vllm = Compiling()
    wired = wired_to(vllm.prepare)
    tokens = msgspec.msgpack.encode([7])
    cancels = [say.CancelReservation(move=1, number=number, request="r1", lease=1) for number in (2, 3)]
    wired.send(say.ReserveBlocks(move=1, number=1, request="r1", token_capacity=1), b"first", tokens)
    wired.send(cancels[0])
    wired.send(wire.ResumeRequest(request="r1", lease=2), b"again", tokens)
    wired.send(cancels[1])
    assert [wired.inbox.get(timeout=PATIENCE_S) for _ in cancels] == cancels
    vllm.grammars[b"again"].set_result(None)
    assert wired.inbox.get(timeout=PATIENCE_S).lease == 2


@pytest.mark.parametrize("ends", ["a copy", "a step"])
def test_a_request_resumes_once_nothing_of_its_past_is_in_flight(ends: str) -> None:
    """A copy would write into its blocks; a step in flight would repeat a token, or end the worker."""
    resumed: list[str] = []
    written, in_flight = ({"r1"}, set()) if ends == "a copy" else (set(), {"r1"})
    residency: Any = SimpleNamespace(
        written=written,
        expected=(),
        frozen=(),
        is_in_flight=in_flight.__contains__,
        attach_unreserved=lambda arrival: resumed.append(arrival.request_id),
    )
    book, nobody = Book(), cast("Any", None)
    requests = Requests(residency, nobody, book, nobody)
    requests.resume(ReadyToResume(cast("Any", SimpleNamespace(request_id="r1")), 2, NO_EVENT))
    requests.resume_deferred()
    assert (resumed, book.leases) == ([], {})
    written.clear()
    in_flight.clear()
    requests.resume_deferred()
    requests.resume_deferred()
    assert (resumed, book.leases) == (["r1"], {"r1": 2})


def test_a_worker_ends_with_its_essential_threads() -> None:
    """One that can no longer read or write its wire is replaced at once, and its last line says why."""
    code = """
import threading
from melld.engine.worker.start import vital
def work(): raise ValueError("the stream is out of step")
threading.Thread(target=vital(work)).start()
threading.Event().wait(30)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ValueError: the stream is out of step"
