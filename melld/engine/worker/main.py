"""The worker process: one vLLM engine on one device, stepping in a loop of its own.

Owns the engine and the order of what happens to it.  Four threads:

    reader   wire -> frames -> line; answers pings
    preparer line -> vLLM requests -> inbox
    engine   inbox between two steps, then one step, then its results -> outbox (the main thread, here)
    writer   outbox -> MessagePack -> wire

so nothing is serialised on the step path, and a ping waits for nothing.  The worker ends if one thread fails.
Only this process imports vLLM's engine; loading this file does not, as the environment must be set first.
"""

import contextlib
import ctypes
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
from setproctitle import setproctitle

from melld.engine.wire import messages as wire
from melld.engine.wire.spec import WorkerSpec
from melld.engine.worker.start import build_engine, ready_of, vital, warm_up
from melld.engine.worker.writer import write_frame

IDLE_S = 1.0
"""Idle time after which a worker returns free memory to the kernel."""


def main(spec: WorkerSpec, connection: socket.socket) -> None:
    """Run a worker, in a process forked from the template (`worker.forking`), in the environment that `spec` names.

    `connection`: this side of the wire.
    """
    setproctitle(f"melld: worker {spec.worker}")
    if spec.device_kind == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_devices)
    worker = None
    try:
        worker = EngineLoop(spec, connection)
        worker.serve()
    except Exception as error:  # noqa: BLE001  the task boundary of the process: report to the daemon, then exit
        failed = wire.WorkerFailed(reason=reason_of(error), traceback=traceback.format_exc())
        if worker is None:
            write_frame(connection, failed)
        else:
            worker.say_last(failed)
        os._exit(1)
    os._exit(0)  # skips the destructors of vLLM and torch, which can hang


def reason_of(error: Exception) -> str:
    """Return what failed; if vLLM refuses several values, what is wrong with the first."""
    from pydantic import ValidationError

    said = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
    return f"{type(error).__name__}: {said}"


class EngineLoop:
    """An engine and its loop."""

    def __init__(self, spec: WorkerSpec, connection: socket.socket) -> None:
        started = time.monotonic()
        from melld.engine.worker.ranks import watched
        from melld.engine.worker.residency.arena import ArenaMemory

        arena = ArenaMemory(spec.arena) if spec.arena is not None else None
        self._engine, response = build_engine(
            spec,
            lambda stage: write_frame(connection, wire.WorkerLoading(stage)),
            arena,
            lambda executor: watched(executor, [connection.fileno()]),
        )
        from melld.engine.worker.parts import Parts

        failure = arena.failure if arena is not None else ""
        self._parts = parts = Parts(self._engine, spec, connection, None if failure else arena)
        self._stopping = False
        self._handlers = self._handlers_of()
        write_frame(connection, wire.WorkerLoading("generating its first token"))
        with parts.budget.lifted(), parts.lent.borrowed() if parts.lent is not None else contextlib.nullcontext():
            warm_up(self._engine)
        load_s = time.monotonic() - started
        self._ready = ready_of(self._engine, parts.shared, response, load_s, failure)
        parts.writer.say(self._ready)

    def serve(self) -> None:
        """Step until told to stop, then return once all messages are written."""
        inbox, writer = self._parts.inbox, self._parts.writer
        for name, work in (("reader", self._parts.read), ("preparer", self._parts.preparer.run)):
            threading.Thread(target=vital(work), name=name, daemon=True).start()
        writer.start()
        while not self._stopping:
            while not inbox.empty():
                self._handle(inbox.get())
            self._parts.requests.resume_deferred()
            self._parts.moves.before_step()
            is_busy = self._engine.scheduler.has_requests() or bool(self._engine.batch_queue)
            step = self._parts.borrower.go_on(is_busy) or self._engine.step_fn
            if is_busy:
                self._step(step)
            elif not self._stopping:
                if not self._parts.dozer.dozes:
                    self._parts.reporter.report(None, 0.0)
                    self._parts.dozer.go_on()
                self._handle(self._wait())
        writer.finish()

    def say_last(self, message: msgspec.Struct) -> None:
        """Write a last message after all earlier ones."""
        self._parts.writer.say(message)
        self._parts.writer.finish()

    def _wait(self) -> Any:
        """Return the next message of the inbox; when idle, have glibc return free memory to the kernel."""
        try:
            return self._parts.inbox.get(timeout=IDLE_S)
        except queue.Empty:
            ctypes.CDLL(None).malloc_trim(0)  # takes up to 0.1 s
            return self._parts.inbox.get()

    def _handlers_of(self) -> dict[type, Callable[[Any], None]]:
        """Return the handler of each message type."""
        from melld.engine.worker.links import LinkTried, Opening
        from melld.engine.worker.requests import Admitted, ReadyToResume
        from melld.migrate.transports.copies import CopyDone

        requests, links, moves = self._parts.requests, self._parts.links, self._parts.moves
        return {
            Admitted: requests.admit,
            ReadyToResume: requests.resume,
            wire.AbortRequests: self._abort,
            wire.LoadAdapter: self._load_adapter,
            wire.GrantGranules: self._parts.borrower.grant,
            wire.TakeGranules: self._parts.borrower.take,
            wire.Doze: self._parts.dozer.ask,
            wire.StopDozing: lambda _: None,  # the reader has told the dozer, which looks at it next
            wire.Wake: lambda _: self._parts.dozer.wake(self._ready),
            wire.StopWorker: self._stop,
            Opening: lambda opening: links.open(opening.peer, opening.handle),
            wire.CloseLink: lambda gone: links.close(gone.peer),
            LinkTried: links.tried,
            CopyDone: moves.copied,
            **dict.fromkeys(moves.handlers, moves.handle),
        }

    def _handle(self, message: Any) -> None:
        self._handlers[type(message)](message)

    def _abort(self, abort: wire.AbortRequests) -> None:
        self._parts.requests.abort(abort)
        if not abort.may_return:  # else the grammar may be wanted already for its return
            self._parts.grammars.forget(abort.requests)

    def _load_adapter(self, load: wire.LoadAdapter) -> None:
        from vllm.lora.request import LoRARequest

        from melld.engine.worker.residency.rules import load_adapter

        why = load_adapter(self._engine, msgspec.convert(load.adapter, LoRARequest))
        error = None if why is None else f"add_lora: {why}"
        self._parts.writer.say(wire.UtilityDone(call=load.call, result=error is None, error=error))

    def _stop(self, _stop: wire.StopWorker) -> None:
        self._stopping = True

    def _step(self, step: Callable[[], tuple[Any, bool]]) -> None:
        parts, began_s = self._parts, time.monotonic()
        assert not parts.dozer.dozes, "a dozing worker cannot compute"
        parts.pulse.in_step(began_s)
        outputs, executed = step()
        self._engine.post_step(model_executed=executed)
        step_s = time.monotonic() - began_s
        counts = parts.budget.stepped(step_s)
        if not any(counts):
            step_s = 0.0  # no step has ended: it only began one
        parts.pulse.in_step(0.0)
        mine = (outputs or {}).get(0)
        parts.moves.after_step(mine)
        parts.reporter.report(mine, step_s, counts)
        parts.moves.after_report(step_s)
        if not executed and self._engine.scheduler.has_requests():
            time.sleep(0.001)  # all requests wait for a grammar: leave the GIL to the thread that compiles it
