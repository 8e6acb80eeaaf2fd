"""A client that costs little: requests that are bytes already, on connections that are kept.

Owns the connections to one daemon, as many as there were requests at once.  A request has no task and no parsed head;
of an answer the status is read, and whether all of its body has come.  For benchmarks that share their processors with
the daemon.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


class Answer(NamedTuple):
    """A whole answer; status 0 where the connection ended before it was whole."""

    status: int
    body: bytes = b""


class PlainClient:
    """Asks one daemon."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._idle: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()

    def post(self, path: str, body: bytes) -> bytes:
        """Return the bytes of a request with a JSON body."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._parts.netloc}\r\nContent-Type: application/json\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def ask(self, request: bytes, done: Callable[[Answer], None]) -> None:
        """Send it now, on a new connection if none is idle; `done` is called once, with the answer."""
        if self._idle:
            self._idle.pop().ask(request, done)
            return
        task = asyncio.create_task(self._open(request, done))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, request: bytes, done: Callable[[Answer], None]) -> None:
        loop = asyncio.get_running_loop()
        host, port = self._parts.hostname, self._parts.port
        try:
            _, connection = await loop.create_connection(lambda: Connection(self._idle), host, port)
        except OSError:
            done(Answer(0))
        else:
            connection.ask(request, done)


class Connection(asyncio.Protocol):
    """One request at a time; in `idle` while there is none."""

    def __init__(self, idle: list["Connection"]) -> None:
        self._idle = idle
        self._received = b""
        self._done: Callable[[Answer], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that it is open."""
        self._transport: Any = transport  # uvloop's is no asyncio.Transport by its type

    def ask(self, request: bytes, done: Callable[[Answer], None]) -> None:
        """Send a request."""
        self._done, self._received = done, b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Wait for the whole answer."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or (length is not None and len(body) < int(length[1])):
            return
        if length is None or len(body) > int(length[1]) or not head.startswith(b"HTTP/1.1 "):
            self._transport.abort()  # nothing that this client understands: counted as lost
            return
        if _CLOSES.search(head):
            self._transport.close()
        else:
            self._idle.append(self)
        self._end(Answer(int(head[9:12]), body))

    def connection_lost(self, _error: Exception | None) -> None:
        """Note that it is no more, and neither is the answer that was awaited."""
        if self in self._idle:
            self._idle.remove(self)
        self._end(Answer(0))

    def _end(self, answer: Answer) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(answer)
