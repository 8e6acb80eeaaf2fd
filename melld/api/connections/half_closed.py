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


async def abort_once_gone(transport: asyncio.Transport, is_waiting: Callable[[], bool], *, is_old: bool) -> None:
    """Watch a connection whose client sends no more until it is closed; abort it when its client has left.

    `is_waiting` returns True before the answer has started; `is_old`: the client speaks HTTP/1.0.
    """
    loop = asyncio.get_running_loop()
    began_s, waited_s, probe_after_s = loop.time(), FIRST_LOOK_S, FIRST_LOOK_S
    while True:
        await asyncio.sleep(min(waited_s, LONGEST_INTERVAL_S))
        if transport.is_closing():
            return
        waited_s, waits = loop.time() - began_s, is_waiting()
        if _is_gone(transport) or (is_old and waits and waited_s >= OLD_CLIENTS_S):
            transport.abort()
            return
        if waits and not is_old and waited_s >= probe_after_s:
            transport.write(PROBE)
            probe_after_s *= PROBE_AGAIN


def _is_gone(transport: asyncio.Transport) -> bool:
    """Return True if the kernel reports that nothing can be sent either."""
    kernel = select.poll()
    kernel.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(kernel.poll(0))
