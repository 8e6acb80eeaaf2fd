"""The reader thread of a worker: it only waits for the wire, so it can answer a ping at any time.

Owns the reading, and the pulse that answers a ping.  Never prepares a request (`preparer.py` does) and never touches
the scheduler.

    wire ──► frames ──► line ──► preparer ──► inbox          pings are answered here, even during a step
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.wire import messages as wire
from melld.engine.wire.frames import READ_BYTES, FrameDecoder

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

Received = tuple[Any, list[bytes]]
"""A message of `wire.ToWorker` and its payload, as read."""


class Pulse:
    """How long the engine's current step has run, so that pings are answered even if it hangs; the daemon's time.

    Each number is written by one thread, the engine's or the reader's, and read by the other; both are atomic.
    """

    def __init__(self) -> None:
        self._began_s = 0.0
        self._ahead_s = 0.0  # of the daemon's clock, which is that of another machine where this worker runs on one

    def in_step(self, began_s: float) -> None:
        """Record the start time of a step, or 0.0 at its end."""
        self._began_s = began_s

    def daemon_s(self) -> float:
        """Return the time on the daemon's monotonic clock, as learned from its last ping."""
        return time.monotonic() - self._ahead_s

    def pong(self, ping: wire.Ping) -> wire.Pong:
        """Return the answer to a ping."""
        self._ahead_s = time.monotonic() - ping.at_s
        began_s = self._began_s
        return wire.Pong(time.monotonic() - began_s if began_s else 0.0)


def read(
    connection: socket.socket,
    engine: "EngineCore",
    line: "queue.SimpleQueue[Received]",
    answer: Callable[[msgspec.Struct], None],
    pong: Callable[[wire.Ping], wire.Pong],
    is_wanted: threading.Event,
) -> None:
    """Put messages on `line` in order, and answer pings, until the daemon closes the socket; then exit.

    `is_wanted` tells an engine that goes to doze to stop that.
    """
    frames = FrameDecoder(wire.ToWorker)
    while data := connection.recv(READ_BYTES):
        for message, payload in frames.feed(data):
            if isinstance(message, wire.Ping):
                answer(pong(message))
                continue
            if isinstance(message, wire.StopDozing):
                is_wanted.set()
            if isinstance(message, wire.AbortRequests) and not message.may_return:
                # Also tell the running step, so that it need not compute this output.  If no step runs, the next one
                # hears of it: too late for a request that has returned by then.
                engine.aborts_queue.put_nowait(message.requests)
            line.put((message, payload))
    os._exit(0)
