"""Tells a client that has closed only its sending side, and gets its answer, from one that has left.

Both send the end of the stream (FIN).  To tell them apart, something must be sent: the kernel of a client that has left
replies with a reset, which this watch sees.  Before the answer starts, that is `100 Continue`, which HTTP/1.1 clients
ignore; later it is the answer itself.  HTTP/1.0 has no such response: there the answer must start soon.
"""

import asyncio
import select
from collections.abc import Callable

FIRST_LOOK_S = 0.05
"""A quicker answer needs no watch."""
LONGEST_INTERVAL_S = 2.0
PROBE_AGAIN = 10
"""Factor from one probe's time to the next: some clients ignore five interim responses and no more."""
OLD_CLIENTS_S = 1.0
"""How long a client of HTTP/1.0 is assumed to listen."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosedWatch:
    """Watches one connection whose client sends no more, and aborts it when its client has left.

    `is_waiting` returns True before the answer has started; `is_old`: the client speaks HTTP/1.0.
    """

    def __init__(self, transport: asyncio.Transport, is_waiting: Callable[[], bool], *, is_old: bool) -> None:
        self._transport = transport
        self._is_waiting = is_waiting
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._is_old = is_old
        self._probe_after_s = FIRST_LOOK_S
        self._interval_s = FIRST_LOOK_S
        self._timer = self._loop.call_later(self._interval_s, self._look)

    def stop(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        waited_s = self._loop.time() - self._began_s
        is_waiting = self._is_waiting()
        if self._is_gone() or (self._is_old and is_waiting and waited_s >= OLD_CLIENTS_S):
            self._transport.abort()
            return
        if is_waiting and not self._is_old and waited_s >= self._probe_after_s:
            self._transport.write(PROBE)
            self._probe_after_s *= PROBE_AGAIN
        self._timer = self._loop.call_later(self._interval_s, self._look)
        self._interval_s = min(2 * self._interval_s, LONGEST_INTERVAL_S)

    def _is_gone(self) -> bool:
        """Return True if the kernel reports that nothing can be sent either."""
        kernel = select.poll()
        kernel.register(self._transport.get_extra_info("socket").fileno(), 0)
        return bool(kernel.poll(0))
