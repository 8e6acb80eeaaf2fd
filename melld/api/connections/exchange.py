"""One HTTP request while it is answered: its client, how far its answer has come, and how it is counted.

Owns the head of every answer, and the metrics `melld_http_*`: one series per route and status; unknown paths never
become labels.  Decides nothing: `app` does.
"""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, cast

from aiohttp import web
from aiohttp.http_writer import StreamWriter
from aiohttp.payload import Payload
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry, Counter, Gauge

from melld.api.answers import JSON, Dialect
from melld.api.connections.origins import answer_head, preflight_head
from melld.api.guards.request import is_request_id
from melld.api.keys import Client
from melld.config_server import ServerConfig

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
PIECE_BYTES = 1 << 20
"""Of a long body, given to the connection in one turn of the event loop."""


class LongBody(Payload):
    """A body written piece by piece: tens of megabytes at once would block the loop."""

    _autoclose = True

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    async def write(self, writer: Any) -> None:
        """Write all pieces, without waiting for the client to read."""
        for start in range(0, len(self._value), PIECE_BYTES):
            await writer.write(self._value[start : start + PIECE_BYTES], drain=False)
            await asyncio.sleep(0)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the text."""
        return str(self._value, encoding, errors)


class Exchange:
    """An HTTP request while it is answered."""

    def __init__(self, request: web.BaseRequest, config: ServerConfig) -> None:
        self.request = request
        self._config = config
        wanted = request.headers.get("X-Request-Id")
        self.request_id = wanted if is_request_id(wanted) else uuid.uuid4().hex
        self.route = "other"
        self.client = Client()
        self.dialect = Dialect.OPENAI
        self.parameters: frozenset[str] = frozenset()
        self.response: web.StreamResponse | None = None
        """The stream after its head has been sent."""
        self.events = 0
        self._protocol, self._writer = request.protocol, cast("StreamWriter", request.writer)

    async def begin(self) -> web.StreamResponse:
        """Return the stream, sending its head first if necessary."""
        if self.response is None:
            stream = web.StreamResponse(headers=HEADERS | self._head())
            await stream.prepare(self.request)
            self.response = stream
        return self.response

    async def write(self, event: str) -> None:
        """Write an event into the stream; wait while its client reads too slowly."""
        assert self.response is not None
        if not self.send(encoded := event.encode()):
            await self.response.write(encoded)
            self.events += 1

    @property
    def is_paused(self) -> bool:
        """Return True while the client reads too slowly."""
        return self._protocol.writing_paused

    def send(self, event: bytes) -> bool:
        """Write an event into the begun stream without waiting; return False if it is paused or closing."""
        transport, writer = self._protocol.transport, self._writer
        if self._protocol.writing_paused or transport is None or transport.is_closing():
            return False
        framed = b"%x\r\n%b\r\n" % (len(event), event) if writer.chunked else event
        transport.write(framed)
        writer.output_size += len(framed)  # counted as its own writes are
        writer.buffer_size += len(framed)
        self.events += 1
        return True

    def comment(self, text: bytes) -> None:
        """Write what is no event, likewise."""
        self.events -= self.send(text)

    def whole(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, *, leaves_body: bool = False
    ) -> web.Response:
        """Return a whole answer.  `leaves_body`: close the connection, as the unread body would look like a request."""
        named = CIMultiDict({"Content-Type": JSON})
        named.update(headers or {})
        response = web.Response(status=status, body=LongBody(body) if len(body) > PIECE_BYTES else body, headers=named)
        if leaves_body and not self.request.content.is_eof():
            response.force_close()
        return response

    def preflight(self) -> web.Response | None:
        """Return the response to a CORS preflight from an allowed page; None for any other request."""
        head = preflight_head(self.request.method, self.request.headers, self._config)
        return None if head is None else self.whole(b"", 204, head, leaves_body=True)

    def complete(self, answer: web.StreamResponse) -> None:
        """Add the common headers to an answer that has not been sent."""
        if not answer.prepared:
            for name, value in self._head().items():
                answer.headers.setdefault(name, value)

    def _head(self) -> dict[str, str]:
        names = ("x-request-id", "request-id") if self.dialect is Dialect.ANTHROPIC else ("x-request-id",)
        return dict.fromkeys(names, self.request_id) | answer_head(self.request.headers, self._config)


class HttpMetrics:
    """The counters of one daemon's API."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter(
            "melld_http_answers", "Responses sent, by route and status", ["route", "status"], registry=registry
        )
        self.in_flight = Gauge("melld_http_calls_in_flight", "Calls waiting for an engine", registry=registry)
        self.disconnects = Counter(
            "melld_http_disconnects", "Clients that disconnected before their response was complete", registry=registry
        )
        self.slow_readers = Counter(
            "melld_http_slow_readers", "Streams ended because their client stopped reading", registry=registry
        )
        self.failed_streams = Counter(
            "melld_http_failed_streams", "Streams that ended with an error event", registry=registry
        )

    def answered(self, route: str, status: int) -> None:
        """Count one answer."""
        self._answers.labels(route, str(status)).inc()
