"""The worker process: one vLLM engine on one device, stepping in a loop of its own.

Owns the engine and the order of what happens to it.  Three threads:

    reader   wire -> frames -> vLLM requests (hashing, grammars) -> inbox         never touches the scheduler
    engine   inbox between two steps, then one step, then its results -> outbox   the main thread
    writer   outbox -> MessagePack -> wire

so that nothing is serialised on the step path.  The only process that imports vLLM's engine.
"""

import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine import wire
from melld.engine.frames import Buffer, FrameDecoder, encode_frame
from melld.engine.worker_faults import VARIABLE, FaultPoints
from melld.engine.worker_start import block_bytes_of, build_engine, die_with_parent, ready_of, warm_up
from melld.errors import MelldError
from melld.migrate import migration_messages as say
from melld.migrate.snapshot import WARM_SUFFIX, MoveRefused, RequestSnapshot

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs


def main(spec_bytes: bytes, connection: socket.socket, log: int) -> None:
    """Where the process begins, forked from the template (`worker_template`).

    Args:
        spec_bytes: a `wire.WorkerSpec` as MessagePack.
        connection: this side of the wire.
        log: the file descriptor of a pipe: whatever the process prints, its libraries and a dying interpreter included.
    """
    spec = msgspec.msgpack.decode(spec_bytes, type=wire.WorkerSpec)
    die_with_parent(spec.parent_pid)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon, which then ends us in good order
    os.environ.update(spec.environment)
    if spec.device_kind == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_devices)
    try:
        worker = Worker(spec, connection)
        worker.serve()
    except Exception as error:  # noqa: BLE001  the task boundary of the process: told to the daemon, then the end
        failed = wire.WorkerFailed(reason=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        _write(connection, encode_frame(failed))
        os._exit(1)
    os._exit(0)  # not through vLLM's and torch's destructors, which can hang


class Worker:
    """One engine and its loop."""

    def __init__(self, spec: wire.WorkerSpec, connection: socket.socket) -> None:
        started = time.monotonic()
        self._connection = connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[msgspec.Struct, Any] | None] = queue.SimpleQueue()
        self._engine, response = build_engine(spec)
        from melld.engine.block_report import BlockReporter
        from melld.engine.residency import Residency
        from melld.engine.worker_links import LinkOpener, Links, LinkTried, share_memory
        from melld.engine.worker_migration import Moves
        from melld.engine.worker_migration_book import Book
        from melld.engine.worker_profile import Profiler
        from melld.migrate.transports.copies import CopyDone

        memory, self._kv_handle = share_memory(self._engine)
        self._block_bytes = memory.layout.block_bytes if memory is not None else block_bytes_of(self._engine)
        self._reporter = BlockReporter(self._engine.scheduler)
        self._residency = Residency(self._engine, self._block_bytes)
        self._book = Book()
        self._faults = FaultPoints(os.environ.get(VARIABLE), spec.worker)
        opener = LinkOpener(memory, spec.copy_rules, self._faults)
        self._links = Links(opener, self._residency, self._inbox.put, self._say)
        self._moves = Moves(self._residency, self._links, self._book, self._faults, self._say)
        self._profiler = Profiler(self._engine, self._residency, self._links, self._is_wanted, self._say, self._in_step)
        self._deferred: list[_Resumed] = []
        self._last_used_blocks = -1
        self._steps = 0
        self._reports = 0
        self._step_began_s = 0.0
        self._stopping = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            _Admitted: self._on_admitted,
            _Resumed: self._on_resumed,
            wire.AbortRequests: self._on_abort,
            wire.CallUtility: self._on_utility,
            wire.StopWorker: self._on_stop,
            wire.MeasurePrefill: self._profiler.measure_prefill,
            wire.MeasureLink: self._profiler.measure_link,
            _OpenLink: lambda link: self._links.open(link.peer, link.handle),
            wire.CloseLink: lambda gone: self._links.close(gone.peer),
            LinkTried: self._links.tried,
            CopyDone: self._on_copied,
            **dict.fromkeys(self._moves.handlers, self._moves.handle),
        }
        warm_up(self._engine)
        load_s = time.monotonic() - started
        self._say(ready_of(self._engine, self._block_bytes, self._kv_handle, response, load_s))

    def serve(self) -> None:
        """Step until told to stop.  Returns when everything said has been written."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        writer = threading.Thread(target=self._write, name="writer", daemon=True)
        writer.start()
        while not self._stopping:
            while not self._inbox.empty():
                self._handle(self._inbox.get())
            if self._has_work():
                self._step()
            else:
                self._report(None, 0.0)
                self._handle(self._inbox.get())
        self._outbox.put(None)
        writer.join(timeout=5.0)

    # -- the engine thread ------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._engine.scheduler.has_requests() or self._engine.batch_queue)

    def _handle(self, message: Any) -> None:
        self._handlers[type(message)](message)

    def _on_admitted(self, admitted: "_Admitted") -> None:
        self._book.came(admitted.request.request_id, admitted.lease)
        self._engine.add_request(admitted.request)

    def _on_resumed(self, resumed: "_Resumed") -> None:
        request = resumed.snapshot.request
        if self._moves.is_written(request):  # a migration to here that was called off: its blocks are not free yet
            self._deferred.append(resumed)
            return
        self._clear(request)
        try:
            self._residency.attach_unreserved(resumed.arrival, resumed.snapshot)
        except MoveRefused as error:
            self._say(wire.RequestRejected(request=request, reason=str(error)))
        else:
            self._book.came(request, resumed.lease)
            self._faults.reach("resumed")

    def _clear(self, request: str) -> None:
        """Forget what a migration that was called off has left here of the request: it comes again, in another way."""
        if request in self._book.leases or request in (*self._residency.expected, *self._residency.frozen):
            self._moves.forget([request])
            self._residency.abort([request])
            self._book.left(request)

    def _on_copied(self, done: Any) -> None:
        if self._profiler.copied(done):
            return
        self._moves.copied(done)
        deferred, self._deferred = self._deferred, []
        for resumed in deferred:
            self._on_resumed(resumed)

    def _on_abort(self, abort: wire.AbortRequests) -> None:
        self._moves.forget(abort.requests)
        self._deferred = [resumed for resumed in self._deferred if resumed.snapshot.request not in abort.requests]
        self._residency.abort(abort.requests)
        for request in abort.requests:
            self._book.left(request)

    def _on_utility(self, call: wire.CallUtility) -> None:
        try:
            result = getattr(self._engine, call.method)(*call.arguments)
        except (RuntimeError, ValueError, TypeError) as error:
            self._say(wire.UtilityDone(call=call.call, error=f"{call.method}: {error}"))
        else:
            self._say(wire.UtilityDone(call=call.call, result=result))

    def _on_stop(self, _stop: wire.StopWorker) -> None:
        self._stopping = True

    def _is_wanted(self) -> bool:
        return not self._inbox.empty()

    def _in_step(self, began_s: float) -> None:
        self._step_began_s = began_s

    def _step(self) -> None:
        began_s = self._step_began_s = time.monotonic()
        outputs, executed = self._engine.step_fn()
        self._engine.post_step(model_executed=executed)
        step_s = time.monotonic() - began_s
        self._step_began_s = 0.0
        self._steps += 1
        mine = (outputs or {}).get(0)
        self._moves.after_step(mine)
        self._report(mine, step_s)
        self._moves.after_report()
        self._faults.reach("step")
        if not executed and self._engine.scheduler.has_requests():
            time.sleep(0.001)  # only requests that wait for a grammar: let the thread that compiles it have the GIL

    def _report(self, outputs: "EngineCoreOutputs | None", step_s: float) -> None:
        """Put what this step changed into the outbox; nothing if nothing did."""
        leases, book = {}, self._book
        for output in outputs.outputs if outputs is not None else ():
            if lease := book.leases.get(output.request_id):
                leases[output.request_id] = lease
            if output.finish_reason is not None:
                book.left(output.request_id)
        report = self._reporter.collect()
        if outputs is None and not report.changed and not book.gone and report.used_blocks == self._last_used_blocks:
            return
        self._last_used_blocks = report.used_blocks
        gone, book.gone = book.gone, []
        if self._moves.warming:
            for request in self._moves.warming:
                report.changed.pop(request + WARM_SUFFIX, None)
        self._reports += 1
        done = wire.StepDone(
            step=self._reports,
            step_s=step_s,
            used_blocks=report.used_blocks,
            total_blocks=report.total_blocks,
            blocks=report.changed,
            leases=leases,
            gone=gone,
        )
        self._outbox.put((done, () if outputs is None else outputs))

    def _say(self, message: msgspec.Struct, payload: Sequence[bytes] = ()) -> None:
        """Put a message into the outbox; any thread may."""
        self._outbox.put((message, tuple(payload)))

    # -- the I/O threads --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder

        from melld.engine.worker_migration_book import Attaching

        requests = MsgpackDecoder(EngineCoreRequest)
        frames = FrameDecoder(wire.ToWorker)
        while data := self._connection.recv(1 << 18):
            for message, payload in frames.feed(data):
                match message:
                    case wire.Ping():
                        self._say(self._pong())
                    case wire.AddRequest():
                        self._admit(message, requests.decode(payload))
                    case wire.ResumeRequest():
                        self._say(wire.RequestTaken(request=message.request, lease=message.lease))
                        self._admit(message, RequestSnapshot.decode(payload[0]))
                    case say.ReserveBlocks() | say.WarmRequest():
                        self._expect(message, payload)
                    case say.AttachRequest():
                        self._inbox.put(Attaching(message, RequestSnapshot.decode(payload[0])))
                    case wire.OpenLink():
                        self._inbox.put(_OpenLink(message.peer, payload[0]))
                    case wire.AbortRequests():
                        # Into the running step as well, so that its output is not computed in vain.
                        self._engine.aborts_queue.put_nowait(message.requests)
                        self._inbox.put(message)
                    case _:
                        self._inbox.put(message)
        os._exit(0)  # the daemon is gone, and with it everyone who could want this process

    def _expect(self, command: say.ReserveBlocks | say.WarmRequest, payload: list[bytes]) -> None:
        from melld.engine.worker_migration_book import Expected

        core_request, tokens = payload[0], msgspec.msgpack.decode(payload[1], type=list[int])
        try:
            arrival = self._residency.prepare(core_request, tokens)
        except MelldError as error:
            self._moves.refuse(command, error)
        else:
            self._inbox.put(Expected(command, arrival, core_request, tokens))

    def _admit(self, message: wire.AddRequest | wire.ResumeRequest, request: Any) -> None:
        """What is slow about a new request, off the engine's thread: block hashes, grammars."""
        try:
            if isinstance(message, wire.ResumeRequest):
                arrival = self._residency.prepare(request.core_request, request.output_token_ids)
                self._inbox.put(_Resumed(arrival, request, message.lease))
                return
            prepared, _ = self._engine.preprocess_add_request(request)
        except Exception as error:  # noqa: BLE001  the boundary of one request: answered, and the others go on
            reason = f"{type(error).__name__}: {error}"
            self._say(wire.RequestRejected(request=message.request, reason=reason))
        else:
            self._inbox.put(_Admitted(prepared, message.lease))

    def _write(self) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder

        encoder = MsgpackEncoder()
        while (item := self._outbox.get()) is not None:
            message, payload = item
            buffers = payload if isinstance(payload, tuple) else encoder.encode(payload)
            _write(self._connection, encode_frame(message, buffers))

    def _pong(self) -> wire.Pong:
        began_s = self._step_began_s
        busy_s = time.monotonic() - began_s if began_s else 0.0
        return wire.Pong(steps=self._steps, busy_s=busy_s, requests=len(self._book.leases))


class _Admitted(msgspec.Struct, frozen=True):
    """A request that the reader has made ready for the scheduler (`vllm.v1.request.Request`)."""

    request: Any
    lease: int


class _OpenLink(msgspec.Struct, frozen=True):
    """`wire.OpenLink` with its payload."""

    peer: str
    handle: bytes


class _Resumed(msgspec.Struct, frozen=True):
    """A request that the reader has made ready to go on here (`engine.residency.Arrival`)."""

    arrival: Any
    snapshot: RequestSnapshot
    lease: int


def _write(connection: socket.socket, buffers: list[Buffer]) -> None:
    if sum(memoryview(buffer).nbytes for buffer in buffers) < 1 << 16:
        connection.sendall(b"".join(buffers))
        return
    for buffer in buffers:
        connection.sendall(buffer)
