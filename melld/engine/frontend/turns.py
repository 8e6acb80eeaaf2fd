"""Spreads work over iterations of the event loop: each handles as many pieces, from any callers, as fit a time slice.

Owns the queue of waiting pieces, first come, first served.  A thread would not help: the pieces hold the interpreter
lock, and so would block the loop from any thread.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

SLICE_S = 0.002
"""Time for these pieces in each loop iteration; a piece that begins within it runs to its end."""


class Turns:
    """The time slices of loop iterations.  A caller with many pieces asks again for each."""

    def __init__(self, slice_s: float = SLICE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._slice_s = slice_s
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._at_once = 1
        """How many waiting pieces begin per iteration; it grows after an iteration with time to spare."""
        self._until_s: float | None = None
        """When this iteration's slice ends; None before it begins."""

    async def mine(self) -> None:
        """Return in a loop iteration with time left: in this one if nobody else is waiting."""
        loop = asyncio.get_running_loop()
        if self._until_s is None:
            self._start()
            loop.call_soon(self._turned)
        elif self._waiting or self._clock() >= self._until_s:
            waiting = loop.create_future()
            self._waiting.append(waiting)
            await waiting

    def _start(self) -> None:
        self._until_s = self._clock() + self._slice_s

    def _turned(self) -> None:
        """End the slice and let waiting pieces fill the next one: more than last time if there was time to spare."""
        until_s, self._until_s = self._until_s, None
        if not self._waiting:
            self._at_once = 1
            return
        assert until_s is not None
        self._at_once = 2 * self._at_once if self._clock() < until_s else max(1, self._at_once // 2)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._start)
        self._until_s = -math.inf
        for waiting in [self._waiting.popleft() for _ in range(min(self._at_once, len(self._waiting)))]:
            if not waiting.done():  # otherwise its caller was cancelled
                waiting.set_result(None)
        loop.call_soon(self._turned)
