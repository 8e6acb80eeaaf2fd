"""One HTTP request while it is answered: its client, and how far its answer has come.

Owns the head of every answer.  Decides nothing: `app` does.
"""

import uuid
from collections.abc import Mapping

from aiohttp import web
from multidict import CIMultiDict

from melld.api.answers import JSON, Dialect
from melld.api.keys import Client
from melld.api.streams import HEADERS


class Exchange:
    """An HTTP request while it is answered."""

    def __init__(self, request: web.BaseRequest) -> None:
        self.request = request
        self.request_id = uuid.uuid4().hex
        self.route = "other"
        self.client = Client()
        self.dialect = Dialect.OPENAI
        self.parameters: frozenset[str] = frozenset()
        self.response: web.StreamResponse | None = None
        """The stream after its head has been sent."""
        self.events = 0

    async def begin(self) -> web.StreamResponse:
        """Return the stream, after sending its head if that has not been sent."""
        if self.response is None:
            stream = web.StreamResponse(headers=HEADERS | {"x-request-id": self.request_id})
            await stream.prepare(self.request)
            self.response = stream
        return self.response

    def whole(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, *, leaves_body: bool = False
    ) -> web.Response:
        """Return a whole answer.  `leaves_body`: what is left of the request's would be taken for the next request."""
        named = CIMultiDict({"Content-Type": JSON, "x-request-id": self.request_id})
        named.update(headers or {})
        response = web.Response(status=status, body=body, headers=named)
        if leaves_body and not self.request.content.is_eof():
            response.force_close()
        return response
