"""HTTP/1.1 connections, with the protections that aiohttp's parser and protocol lack.

Owns the time limit for a request's head, the answers to heads that cannot be parsed, are too large (431) or frame
their body ambiguously, the limit on the framing of chunked bodies, and whether a request is under way.  Knows nothing
of routes.
"""

import asyncio
import logging
import socket
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web import RequestPayloadError

from melld.api.answers import Answer, Dialect
from melld.api.connections.patience import Patience
from melld.api.connections.reader_watch import ReaderWatch
from melld.config_server import ServerConfig

log = logging.getLogger("melld.api")

MAX_URL_BYTES = 4096
# What the kernel buffers of a stream whose reader takes nothing; beyond it the writer has to wait.
UNSENT_BYTES = 128 << 10
LINGER_S = 2.0
# A chunked body may take twice its size, plus two reads of the transport.  Each chunk costs the event loop some
# microseconds; extensions of chunks, zeros before their sizes and trailers carry nothing that melld uses.
WIRE_BYTES_PER_BYTE = 2
WIRE_BYTES_SPARE = 512 << 10
END_OF_HEAD, END_OF_CHUNKS = b"\r\n\r\n", b"0\r\n\r\n"


class Connection(web.RequestHandler):
    """A client's connection."""

    __slots__ = (
        "_body",
        "_head_timer",
        "_is_held",
        "_last",
        "_limits",
        "_loses",
        "_requests_answered",
        "_requests_seen",
        "_wire_bytes",
    )

    def __init__(self, manager: web.Server, limits: ServerConfig, **options: Any) -> None:
        super().__init__(
            manager,
            max_line_size=MAX_URL_BYTES,
            max_field_size=limits.max_header_bytes,
            max_headers=limits.max_headers,
            keepalive_timeout=limits.keep_alive_s,
            lingering_time=LINGER_S,
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            logger=log,
            **options,
        )
        self._limits = limits
        self._head_timer: Patience | None = None
        self._is_held: bool | None = None
        """Not read from until `read_on`; None before the first bytes have come."""
        self._requests_seen = 0
        self._requests_answered = 0
        self._last: Any = None
        """Head of the last request, or the parser's error."""
        self._body: StreamReader = EMPTY_PAYLOAD
        """Its body."""
        self._loses = False
        """True once the parser may have dropped what came behind a request for another protocol."""
        self._wire_bytes = 0
        """Bytes received for it since its head; below 0 once it is refused."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time limit for the first head."""
        super().connection_made(transport)
        if (connected := transport.get_extra_info("socket")) and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._arm()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop all timers."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; limit the time of a head and the framing of a body."""
        if self._wire_bytes < 0 or self._loses:
            return
        self._is_held = False
        was_whole, body_bytes = self._body.is_eof(), self._body.total_bytes
        super().data_received(data)
        if has_head := self._request_count != self._requests_seen:
            self._requests_seen = self._request_count
            self._last, self._body = self._messages[-1]
            self._wire_bytes = 0
            self._disarm()
        elif self._head_timer is None and self._awaits_head():
            self._arm()
        elif not self._body.is_eof():
            self._wire_bytes += len(data)
            if self._wire_bytes > WIRE_BYTES_PER_BYTE * self._body.total_bytes + WIRE_BYTES_SPARE:
                self._refuse_framing()
        if self._body.is_eof() and (has_head or not was_whole):
            head_bytes = data.find(END_OF_HEAD) + len(END_OF_HEAD) if has_head else 0
            self._loses = self._may_lose(data, head_bytes, self._body.total_bytes - (0 if has_head else body_bytes))

    def _may_lose(self, data: bytes, head_bytes: int, body_bytes: int) -> bool:
        """Return True if the parser may have dropped the end of `data`, which completed a request.

        It does so behind one that asks for another protocol (aiohttp 3.14), but for WebSocket.
        """
        if self._upgraded or not getattr(self._last, "upgrade", False):
            return False
        return not data.endswith(END_OF_CHUNKS) if self._last.chunked else head_bytes + body_bytes != len(data)

    def _refuse_framing(self) -> None:
        """Fail a body whose chunks are nearly all framing; its reader, if there still is one, answers."""
        if self._current_request is None:
            self.force_close()
            return
        self._wire_bytes = -1  # discard what still comes for a while, so that the answer is not lost
        self._lingering_time = LINGER_S / 4
        self._body.set_exception(RequestPayloadError("its chunks carry almost no content"))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the response, unless the client stopped reading; then accept the next request.

        What came behind a head that asks for another protocol, which it does not get, may be in that: it is dropped,
        and the connection closed, as behind a body that only the connection's end can frame.
        """
        if request.version < HttpVersion11 and resp.content_length is None:
            resp.force_close()  # aiohttp would keep the connection
        came_behind = b""
        if not self._messages:
            came_behind, self._message_tail = self._message_tail, b""
        try:
            with ReaderWatch(request, self._limits.slow_reader_s):
                return await super().finish_response(request, resp, start_time)
        finally:
            self._requests_answered += 1
            if self._wire_bytes < 0:
                self._body._exception = None  # noqa: SLF001  the answer is sent: linger as after any other
            is_last = self._requests_answered == self._requests_seen
            if came_behind or (is_last and self._loses):
                self.close()

    def hold(self) -> None:
        """Read nothing further: now, if no request is under way; else close the connection behind its answer."""
        is_waiting = self._waiter is not None and not self._messages
        if self.transport is None or not is_waiting or (self._head_timer is not None and self._is_held is False):
            if (request := self._current_request) is not None:
                request._message = request._message._replace(should_close=True)  # noqa: SLF001  said in its head
            if not is_waiting:
                self.close()
            return
        self._disarm()
        self.keep_alive(True)  # by the way, it stops the timer that would close it
        self._is_held = True
        self.transport.pause_reading()  # the protocol's own way wants a body that is being read

    def read_on(self) -> None:
        """Read again after `hold`."""
        if self._is_held and self.transport is not None:
            self._is_held = False if self._requests_seen else None
            if not self._requests_seen:
                self._arm()
            self.transport.resume_reading()

    def give_away(self) -> socket.socket | None:
        """Return the socket of a held connection and drop it here, without telling the client."""
        if not self._is_held or self.transport is None:
            return None
        given: socket.socket = self.transport.get_extra_info("socket")
        copied = socket.fromfd(given.fileno(), given.family, given.type)
        self.transport.abort()
        return copied

    def _awaits_head(self) -> bool:
        """Return True if the next bytes are a request's head, not a body and not what is discarded at the end."""
        return self._requests_answered == self._requests_seen and self._keepalive

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a head that the parser refused: 431 if it is too large, 414 for its URL, else 400."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        if isinstance(exc, LineTooLong) and exc.args[1] == MAX_URL_BYTES:
            answer = Answer(414, "the URL is too long", code="url_too_long")
        elif isinstance(exc, LineTooLong) or "Too many headers" in (message or ""):
            limits = f"{self._limits.max_headers} headers of {self._limits.max_header_bytes} bytes"
            answer = Answer(431, f"the request headers exceed {limits}", code="headers_too_large")
        elif status == 400:
            why = (message or "no reason known").partition("\n")[0].rstrip(":. ")[:200]
            answer = Answer(400, f"invalid or unsupported HTTP/1.1 request: {why}", code="malformed_request")
        else:
            log.error("a connection's handler failed", exc_info=exc)
            answer = Answer(500, "Internal server error", code="internal_error")
        return _last_answer(answer)

    def _arm(self) -> None:
        self._head_timer = Patience(self._limits.header_timeout_s, self._head_is_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._awaits_head() or self.transport is None:
            return
        seconds = f"{self._limits.header_timeout_s:g} s"
        body = Answer(408, f"no complete request within {seconds}", code="request_timeout").body(Dialect.OPENAI)
        head = "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.force_close()


class ConnectionServer(web.Server):
    """aiohttp's low-level server with melld's connections."""

    def __init__(self, handler: Any, limits: ServerConfig) -> None:
        super().__init__(self._handle, handler_cancellation=True)
        self._handler = handler
        self._limits = limits

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        return Connection(self, self._limits, loop=self._loop)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        fault = framing_fault(request)
        return await self._handler(request) if fault is None else _last_answer(fault)


def framing_fault(request: web.BaseRequest) -> Answer | None:
    """Return the answer to a framing that the parser takes and the daemon does not (RFC 9112, 6.1), or None."""
    codings = [
        coding.strip().lower() for line in request.headers.getall("Transfer-Encoding", ()) for coding in line.split(",")
    ]
    if not codings or (codings == ["chunked"] and request.version >= HttpVersion11):
        return None
    if request.version < HttpVersion11:
        return Answer(400, "HTTP/1.0 has no Transfer-Encoding", code="malformed_request")
    return Answer(501, "the only supported Transfer-Encoding is chunked", code="unsupported_transfer_encoding")


def _last_answer(answer: Answer) -> web.Response:
    """Return an error after which the connection is closed."""
    response = web.Response(status=answer.status, body=answer.body(Dialect.OPENAI), content_type="application/json")
    response.force_close()
    return response
