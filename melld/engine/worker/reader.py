"""A worker's wire, read by a thread that waits for nothing else: a ping is answered while a request is made ready.

Owns the reading.  Never prepares a request and never touches the scheduler: `worker_preparer` makes ready what the
engine then takes at once.

    wire ──► frames ──► line ──► preparer ──► inbox          a ping is answered from here, also while a step runs
"""

import os
import queue
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.wire import messages as wire
from melld.engine.wire.frames import FrameDecoder

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

READ_BYTES = 1 << 18

Received = tuple[Any, list[bytes]]
"""A message of `wire.ToWorker` and its payload."""


class Reader:
    """`line` takes what was read, in its order; `answer` takes what the daemon is told; `pong` answers a ping."""

    def __init__(
        self,
        connection: socket.socket,
        engine: "EngineCore",
        line: "queue.SimpleQueue[Received]",
        answer: Callable[[msgspec.Struct], None],
        pong: Callable[[], wire.Pong],
    ) -> None:
        self._connection = connection
        self._engine = engine
        self._line = line
        self._answer = answer
        self._pong = pong

    def read(self) -> None:
        """Read until the daemon closes the socket, then exit."""
        frames = FrameDecoder(wire.ToWorker)
        while data := self._connection.recv(READ_BYTES):
            for message, payload in frames.feed(data):
                if isinstance(message, wire.Ping):
                    self._answer(self._pong())
                    continue
                if isinstance(message, wire.AbortRequests):
                    # Into the running step as well, so that its output is not computed in vain.
                    self._engine.aborts_queue.put_nowait(message.requests)
                self._line.put((message, payload))
        os._exit(0)
