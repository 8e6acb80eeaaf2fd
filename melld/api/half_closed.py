"""A client that has said all it will, and still listens, gets its answer; one that has gone gives its places back.

Both send the same: the end of the stream (FIN).  To tell them apart something must be sent: the kernel of one that has
gone answers with a reset, which this watch sees.  Before the answer has begun that is `100 Continue`, which a client of
HTTP/1.1 passes over; afterwards the answer itself.  HTTP/1.0 knows no such thing: there the answer has a moment.
"""

import asyncio
import select
from collections.abc import Callable

FIRST_LOOK_S = 0.05
"""An answer that is quicker needs no watch."""
LONGEST_INTERVAL_S = 2.0
PROBE_AGAIN = 10
"""Each probe comes so many times later than the one before: some clients pass over five interim responses, not more."""
OLD_CLIENTS_S = 1.0
"""How long a client of HTTP/1.0 is believed to be there."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosedWatch:
    """Watches one connection whose client sends no more, until it is stopped; aborts it when its client has gone.

    `is_waiting` says whether nothing of an answer has been sent yet; `is_old` whether the client speaks HTTP/1.0.
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
        """Look no more."""
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
        """Return whether the kernel knows that nothing can be sent either (it reports that unasked)."""
        kernel = select.poll()
        kernel.register(self._transport.get_extra_info("socket").fileno(), 0)
        return bool(kernel.poll(0))
