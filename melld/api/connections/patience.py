"""Limits the time that a client takes, not counting stalls of the daemon itself.

libuv runs late timers before it reads: after a suspension of the daemon (or of its machine), what has come meanwhile
would be too late.
"""

import asyncio
from collections.abc import Callable

READ_S = 0.1
"""Time to read what has come."""


class Patience:
    """A timer of the running loop.  Calls `on_late()` unless it is cancelled."""

    def __init__(self, seconds: float, on_late: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_late = on_late
        self._timer = self._loop.call_later(seconds, self._read_first)

    def cancel(self) -> None:
        """Stop the time."""
        self._timer.cancel()

    def _read_first(self) -> None:
        self._timer = self._loop.call_later(READ_S, self._on_late)
