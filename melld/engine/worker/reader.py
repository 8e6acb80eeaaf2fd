"""A worker's wire, read by a thread that waits for nothing else: a ping is answered while a request is made ready.

Owns the reading, and the pulse that a ping is answered with.  Never prepares a request and never touches the
scheduler: `preparer.py` makes ready what the engine then takes at once.

    wire ──► frames ──► line ──► preparer ──► inbox          a ping is answered from here, also while a step runs
"""

import os
import queue
import socket
import time
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


class Pulse:
    """Whether the engine steps: the answer to a ping, whoever hangs.

    Two numbers, which the engine's thread writes and the reader's reads: each by itself is whole.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._began_s = 0.0

    def in_step(self, began_s: float) -> None:
        """A step began then; 0.0: none runs now."""
        self._began_s = began_s

    def stepped(self) -> None:
        """One of those that the daemon counts has ended."""
        self._began_s = 0.0
        self._steps += 1

    def pong(self, requests: int) -> wire.Pong:
        """As it is now, with so many requests here."""
        began_s = self._began_s
        busy_s = time.monotonic() - began_s if began_s else 0.0
        return wire.Pong(steps=self._steps, busy_s=busy_s, requests=requests)


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
