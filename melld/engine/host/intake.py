"""Reads workers' messages for a bounded time in each turn of the event loop.

Owns whose messages wait.  A paused worker is not read: its wire fills, and then the worker waits itself.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Protocol

from melld.engine.wire.spec import WorkerSpec

log = logging.getLogger("melld.worker")
SLICE_S = 0.002
"""Of each turn of the event loop, for the messages of all workers."""


class Wire(Protocol):
    """A worker's wire."""

    spec: WorkerSpec

    @property
    def has_more(self) -> bool:
        """Return True if bytes have come behind the message that was read last."""

    def read_on(self) -> bool:
        """Handle the next message; return False if none has come."""

    def kill(self, why: str) -> None:
        """End the worker."""


class Intake:
    """Reads the wires of one fleet round-robin."""

    def __init__(self) -> None:
        self._paused: set[str] = set()
        self._waiting: dict[Wire, None] = {}
        self._reading: Wire | None = None
        self._read = 0
        """Messages of this turn."""
        self._is_planned = False
        self._until_s: float | None = None
        """When this turn's slice ends; None before it has begun."""

    def came(self, wire: Wire) -> None:
        """Read a wire that has data: now, if this turn's slice allows it."""
        self._waiting.setdefault(wire)
        if not self._is_planned:
            self._turn()

    def is_behind(self) -> bool:
        """Return True if more has come in this turn than the message that is being handled.

        Then messages should be passed on together, which takes less of the loop's time than one by one.
        """
        return self._read > 1 or bool(self._waiting) or (self._reading is not None and self._reading.has_more)

    def pause(self, worker: str) -> None:
        """Read nothing more of this worker until `resume`."""
        self._paused.add(worker)

    def resume(self, worker: str) -> None:
        """Read this worker again."""
        self._paused.discard(worker)
        self._plan()

    def _plan(self) -> None:
        if self._waiting and not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turned(self) -> None:
        self._until_s, self._read = None, 0

    def _turn(self) -> None:
        self._is_planned = False
        if self._until_s is None:
            self._until_s = time.monotonic() + SLICE_S
            asyncio.get_running_loop().call_soon(self._turned)
        ready = deque(wire for wire in self._waiting if wire.spec.worker not in self._paused)
        while ready and time.monotonic() < self._until_s:
            wire = self._reading = ready.popleft()
            del self._waiting[wire]
            self._read += 1
            try:
                is_more = wire.read_on()
            except Exception:  # the boundary of one message: the others are read, and what it said is lost
                log.exception("cannot handle a worker's message")
                wire.kill("its message could not be handled")
                continue
            if is_more:
                self._waiting[wire] = None  # behind the others
                if wire.spec.worker not in self._paused:
                    ready.append(wire)
        if ready:
            self._plan()
