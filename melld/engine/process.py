"""One worker process as the daemon sees it: its birth, its wire, what it prints, its end.

Owns one process, one socket and one pipe.  Knows the frames, not what they mean.

    STARTING ──ready──► READY ──stop──► STOPPING ──ended──► ENDED        any of them ──ended──► ENDED
"""

import asyncio
import collections
import enum
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from melld.engine import wire
from melld.errors import IllegalTransition

log = logging.getLogger("melld.worker")
MAX_LOG_LINES = 40


class ProcessState(enum.StrEnum):
    """Where a worker process stands."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    ENDED = "ended"


_TRANSITIONS: dict[tuple[ProcessState, str], ProcessState] = {
    (ProcessState.STARTING, "ready"): ProcessState.READY,
    (ProcessState.STARTING, "stop"): ProcessState.STOPPING,
    (ProcessState.READY, "stop"): ProcessState.STOPPING,
    (ProcessState.STOPPING, "ready"): ProcessState.STOPPING,
    (ProcessState.STOPPING, "stop"): ProcessState.STOPPING,
    **{(state, "ended"): ProcessState.ENDED for state in ProcessState if state is not ProcessState.ENDED},
}


class WorkerEnded(msgspec.Struct, frozen=True):
    """A worker process is gone.  `reason` is one line for people; `expected` when it was asked to end."""

    worker: str
    reason: str
    expected: bool
    was_ready: bool


class WorkerProcess:
    """A worker and its wire.  `on_message(message, payload)` and `on_end(ended)` are called on the event loop."""

    def __init__(
        self,
        spec: wire.WorkerSpec,
        on_message: Callable[[Any, list[bytes]], None],
        on_end: Callable[[WorkerEnded], None],
    ) -> None:
        self.spec = spec
        self.state = ProcessState.STARTING
        self.pid = 0
        self._on_message = on_message
        self._on_end = on_end
        self._failure: wire.WorkerFailed | None = None
        self._last_lines: collections.deque[str] = collections.deque(maxlen=MAX_LOG_LINES)
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Spawn the process.  Returns at once; `WorkerReady` or `WorkerEnded` follows.

        Must run on the daemon's main thread: the kernel ties the worker's life to the thread that made it.
        """
        import torch.multiprocessing

        from melld.engine.worker import main

        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        loop = asyncio.get_running_loop()
        try:
            self._process = torch.multiprocessing.get_context("spawn").Process(
                target=main,
                args=(msgspec.msgpack.encode(self.spec), theirs, _InheritedPipe(write_end)),
                name=f"melld {self.spec.worker}",
                daemon=False,
            )
            self._process.start()
        finally:
            theirs.close()
            os.close(write_end)
        self.pid = self._process.pid or 0
        loop.add_reader(self._process.sentinel, self._sentinel_fired)
        await loop.connect_read_pipe(lambda: _Lines(self._printed), os.fdopen(read_end, "rb", 0))
        self._transport, _ = await loop.create_unix_connection(lambda: _Wire(self._received), sock=ours)

    def send(self, message: msgspec.Struct, payload: Sequence[wire.Buffer] = ()) -> None:
        """Write a frame; dropped when the process is gone (its end is told by `on_end`)."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(wire.encode_frame(message, payload))

    async def stop(self, deadline_s: float) -> None:
        """Ask it to end, then kill it; returns when it is gone.  One that still loads has nothing to put in order."""
        if self.state is not ProcessState.ENDED:
            if self.state is ProcessState.STARTING:
                deadline_s = 0.0
            self._step("stop")
            self.send(wire.StopWorker())
            try:
                await asyncio.wait_for(self._ended.wait(), deadline_s)
            except TimeoutError:
                self.kill()
                await self._ended.wait()

    def kill(self) -> None:
        """End it now, even if it is stopped (SIGSTOP) or stuck in a kernel."""
        if self.state is not ProcessState.ENDED:
            os.kill(self.pid, signal.SIGKILL)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last of what it printed."""
        return tuple(self._last_lines)

    def _step(self, event: str) -> None:
        after = _TRANSITIONS.get((self.state, event))
        if after is None:
            raise IllegalTransition("worker", self.spec.worker, self.state, event, self.last_lines)
        self.state = after

    def _received(self, message: Any, payload: list[bytes]) -> None:
        if isinstance(message, wire.WorkerReady):
            self._step("ready")
        elif isinstance(message, wire.WorkerFailed):
            self._failure = message
            log.debug("%s: %s", self.spec.worker, message.traceback)
        if self.state is not ProcessState.ENDED:
            self._on_message(message, payload)

    def _printed(self, line: str) -> None:
        self._last_lines.append(line)
        log.debug("%s: %s", self.spec.worker, line)

    def _sentinel_fired(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        expected = self.state is ProcessState.STOPPING
        was_ready = self.state is ProcessState.READY
        self._step("ended")
        if self._transport is not None:
            self._transport.close()
        self._ended.set()
        self._on_end(WorkerEnded(self.spec.worker, self._reason(self._process.exitcode), expected, was_ready))

    def _reason(self, exit_code: int | None) -> str:
        if self._failure is not None:
            return self._failure.reason.splitlines()[0]
        if exit_code is not None and exit_code < 0:
            name = signal.Signals(-exit_code).name
            hint = {
                "SIGILL": ": this CPU lacks an instruction that the model's data type needs (try dtype = 'float32')",
                "SIGKILL": " (by an administrator, or by the kernel for want of memory)",
            }.get(name, "")
            return f"ended by {name}{hint}"
        last = f": {self._last_lines[-1]}" if self._last_lines else ""
        return f"ended with exit code {exit_code}{last}"


class _InheritedPipe:
    """A file descriptor that travels to the spawned process by inheritance."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        from multiprocessing import reduction

        return _detach, (reduction.DupFd(self._descriptor),)


def _detach(duplicate: Any) -> int:
    return int(duplicate.detach())


class _Wire(asyncio.Protocol):
    def __init__(self, received: Callable[[Any, list[bytes]], None]) -> None:
        self._decoder = wire.FrameDecoder(wire.ToDaemon)
        self._received = received

    def data_received(self, data: bytes) -> None:
        for message, payload in self._decoder.feed(data):
            self._received(message, payload)


class _Lines(asyncio.Protocol):
    def __init__(self, printed: Callable[[str], None]) -> None:
        self._printed = printed
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = self._rest[-4096:]
        for line in lines:
            if text := line.decode(errors="replace").strip():
                self._printed(text)
