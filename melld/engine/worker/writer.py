"""A worker's outbox, and the thread that writes it to the wire.

Owns messages that are not written yet.  The slow work is done here, off the engine thread: vLLM's outputs become bytes
only when it is their turn.
"""

import queue
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer, encode_frame
from melld.engine.worker.start import vital

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

REPORTS_AHEAD = 8
"""Reports that may wait for the wire, which is full when the daemon is behind: then the engine waits."""
LAST_WORDS_S = 5.0
"""Longest wait of `finish` for the wire."""


def write_frame(connection: socket.socket, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
    """Write one frame; return when the socket has all of it."""
    buffers = encode_frame(message, payload)
    if sum(memoryview(buffer).nbytes for buffer in buffers) < 1 << 16:
        connection.sendall(b"".join(buffers))
        return
    for buffer in buffers:
        connection.sendall(buffer)


class Writer:
    """A writer that sends messages to the daemon in the order of `say`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox: queue.SimpleQueue[tuple[msgspec.Struct, Any] | threading.Event | None] = queue.SimpleQueue()
        self._ahead = threading.Semaphore(REPORTS_AHEAD)
        self._thread = threading.Thread(target=vital(self._write), name="writer", daemon=True)

    def say(self, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
        """Put a message into the outbox.  Thread-safe."""
        self._outbox.put((message, tuple(payload)))

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message and return once it is written, so that the daemon gets it whatever happens next."""
        written = threading.Event()
        self._outbox.put((message, ()))
        self._outbox.put(written)
        written.wait()

    def report(self, done: wire.StepDone, outputs: "EngineCoreOutputs | None") -> None:
        """Put a step's report and outputs into the outbox; wait while too many are there."""
        self._ahead.acquire()
        self._outbox.put((done, () if outputs is None else outputs))

    def start(self) -> None:
        """Start to write, beginning with earlier messages."""
        self._thread.start()

    def finish(self) -> None:
        """Wait until all messages are written, or until it takes too long."""
        self._outbox.put(None)
        self._thread.join(timeout=LAST_WORDS_S)

    def _write(self) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder

        encoder = MsgpackEncoder()
        while (item := self._outbox.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            message, payload = item
            buffers = payload if isinstance(payload, tuple) else encoder.encode(payload)
            write_frame(self._connection, message, buffers)
            if isinstance(message, wire.StepDone):
                self._ahead.release()
