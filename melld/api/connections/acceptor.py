"""Accepts connections while there are spare file descriptors and memory; else leaves them in the kernel's queue.

Owns a listening socket.  libuv's own server accepts connections that it has no descriptor for and closes them at once.
"""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable

log = logging.getLogger("melld.api")

WAITING = 1024
"""Connections that the kernel may queue."""
AT_ONCE = 64
"""Connections accepted in one turn of the loop."""
SPARE_DESCRIPTORS = 64
"""Kept for what the daemon opens itself: the wires of a restarted worker, `melld status`, its files."""
LOOK_AGAIN_S = 0.1
SAY_AGAIN_S = 60.0
"""How long all must have been well before the next shortage is told: in one, each connection that ends lets one in."""


class Acceptor:
    """A listening socket, on the running loop; `protocol` makes the protocol of a new connection."""

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener = listener
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._joining: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._short_s = -SAY_AGAIN_S
        """When connections last had to wait."""

    def start(self) -> None:
        """Start to listen."""
        self._listener.setblocking(False)
        self._listener.listen(WAITING)
        self._loop.add_reader(self._listener, self._accept)

    def rest(self) -> None:
        """Accept nothing until `start`: connections wait in the kernel's queue."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)

    def stop(self) -> None:
        """Stop accepting and close the socket."""
        self.rest()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if not has_descriptors_to_spare():
                if self._is_news():
                    log.warning("the daemon is out of file descriptors: new connections wait")
                self._loop.remove_reader(self._listener)
                self._look_again()
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # of memory, say: the connection waits, and must not be tried in every turn
                if self._is_news():
                    log.warning("new connections wait: %s", error)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(LOOK_AGAIN_S, self._look_again)
                return
            self.join(connection)

    def join(self, connection: socket.socket) -> None:
        """Serve this accepted connection."""
        task = self._loop.create_task(self._join(connection))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _join(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:  # the client disconnected already
            log.debug("connection lost while being accepted: %s", error)
            connection.close()

    def _is_news(self) -> bool:
        """Note that connections have to wait; return False if that was noted a moment ago."""
        before_s, self._short_s = self._short_s, self._loop.time()
        return self._short_s - before_s >= SAY_AGAIN_S

    def _look_again(self) -> None:
        if has_descriptors_to_spare():
            self._pause = None
            self._loop.add_reader(self._listener, self._accept)
        else:
            self._short_s = self._loop.time()
            self._pause = self._loop.call_later(LOOK_AGAIN_S, self._look_again)


def has_descriptors_to_spare() -> bool:
    """Return True if the process can open `SPARE_DESCRIPTORS` more files, judging by the lowest free descriptor."""
    try:
        lowest = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(lowest)
    return lowest + SPARE_DESCRIPTORS < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
