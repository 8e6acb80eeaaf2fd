"""A worker's outbox, and the thread that writes it to the wire.

Owns what has been said and is not written yet.  What is slow about an answer is done here, off the engine's thread:
vLLM's outputs become bytes only when it is their turn.
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

LAST_WORDS_S = 5.0
"""How long `finish` waits for the wire."""


def write_frame(connection: socket.socket, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
    """Write one frame; returns when the socket has all of it."""
    buffers = encode_frame(message, payload)
    if sum(memoryview(buffer).nbytes for buffer in buffers) < 1 << 16:
        connection.sendall(b"".join(buffers))
        return
    for buffer in buffers:
        connection.sendall(buffer)


class Writer:
    """The daemon hears of things in the order in which they were said."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox: queue.SimpleQueue[tuple[msgspec.Struct, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=vital(self._write), name="writer", daemon=True)

    def say(self, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
        """Put a message into the outbox; any thread may."""
        self._outbox.put((message, tuple(payload)))

    def report(self, done: wire.StepDone, outputs: "EngineCoreOutputs | None") -> None:
        """The same for what a step has brought."""
        self._outbox.put((done, () if outputs is None else outputs))

    def start(self) -> None:
        """Begin to write; what was said before comes first."""
        self._thread.start()

    def finish(self) -> None:
        """Return when all of it has been written, or when that takes too long."""
        self._outbox.put(None)
        self._thread.join(timeout=LAST_WORDS_S)

    def _write(self) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder

        encoder = MsgpackEncoder()
        while (item := self._outbox.get()) is not None:
            message, payload = item
            buffers = payload if isinstance(payload, tuple) else encoder.encode(payload)
            write_frame(self._connection, message, buffers)
