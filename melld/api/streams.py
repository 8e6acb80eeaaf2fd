"""Streams of server-sent events on their way from vLLM's serving classes to a socket.

vLLM yields ready text.  Here an error that vLLM would write into a stream is raised instead: before the head it becomes
an HTTP status, after it an `error` event in the endpoint's dialect.  A cancelled stream aborts its request.

The head is sent with the first token, or soon after the request has been admitted: from then on only a fault of the
server, or a full machine, can end the stream.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any, Never

from aiohttp import web
from starlette.datastructures import State
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from melld.api.answers import Dialect
from melld.api.calls import CALLS
from melld.api.error_mapping import ServingFault
from melld.api.served_tier import name_in_event
from melld.scheduler.priorities import Tier

HEAD_AFTER_S = 1.0
"""How long an admitted request without a token can still be answered with a status: workers find some errors."""
COMMENT = b": keep-alive\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# `response.created` and `response.in_progress` come before the engine has seen the request.
_HELD_BACK = {Dialect.RESPONSES: 2}


def make_streams_raise(serving: State) -> None:
    """Make vLLM's serving classes raise the errors that they would write into their streams, without logging them.

    All these errors pass through `create_streaming_error_response` (vllm.entrypoints.generate.base.serving).
    """
    for name in {call.serving for call in CALLS.values() if call.streams}:
        handler = getattr(serving, name, None)
        if handler is not None:
            handler.create_streaming_error_response = _raise
            logging.getLogger(type(handler).__module__).setLevel(logging.CRITICAL)


def _raise(
    message: str | Exception,
    err_type: str = "BadRequestError",
    status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
    param: str | None = None,
) -> Never:
    if isinstance(message, Exception):
        raise ServingFault(message) from message
    raise ServingFault(create_error_response(message, err_type, status_code, param))


async def begun(
    stream: AsyncGenerator[Any, None], dialect: Dialect, tier: Tier | None = None
) -> AsyncGenerator[str, None]:
    """Return the stream after its first event, with the tier in its events; raise its errors until then.

    Raises:
        ServingFault, or any error of the stream: nothing has been sent yet.
    """
    held: list[str] = []
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(stream.aclose)
        async for item in stream:
            held.append(_text(item, dialect, tier))
            if len(held) > _HELD_BACK.get(dialect, 0):
                break
        undo.pop_all()
    return _go_on(held, stream, dialect, tier)


async def _go_on(
    held: list[str], stream: AsyncGenerator[Any, None], dialect: Dialect, tier: Tier | None
) -> AsyncGenerator[str, None]:
    try:
        for text in held:
            yield text
        async for item in stream:
            yield _text(item, dialect, tier)
    finally:
        await stream.aclose()


def _text(item: Any, dialect: Dialect, tier: Tier | None) -> str:
    """Return an event as text; raise `ServingFault` for an error event (the Anthropic converter raises none)."""
    if dialect is Dialect.RESPONSES:
        return item if isinstance(item, str) else event_text(item)
    if dialect is Dialect.ANTHROPIC and item.startswith("event: error"):
        error = json.loads(item.partition("data:")[2])["error"]
        raise ServingFault(ErrorResponse(error=ErrorInfo(message=error["message"], type=error["type"], code=500)))
    text: str = item
    return text if tier is None else name_in_event(text, dialect, tier)


def event_text(event: Any) -> str:
    """Return an event of the Responses API as text."""
    return f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"


async def until_head(work: asyncio.Task[Any], admitted: asyncio.Event) -> None:
    """Wait until a stream's head may be sent: `work` (up to the first token) is done, or was admitted a while ago.

    Raises:
        Any error of `work`: nothing has been sent yet.
    """
    waiting = asyncio.ensure_future(admitted.wait())
    try:
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait({work}, timeout=HEAD_AFTER_S)
    finally:
        waiting.cancel()
    if work.done():
        work.result()


class KeepAlive:
    """Writes a comment into a stream after `silence_s` without events.  A context manager around its writing."""

    def __init__(self, response: web.StreamResponse, silence_s: float) -> None:
        self._response = response
        self._silence_s = silence_s
        self._spoken = False
        self._commenting: asyncio.Task[None] | None = None

    def __enter__(self) -> "KeepAlive":
        self._commenting = asyncio.get_running_loop().create_task(self._comment(), name="keep a stream alive")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._commenting is not None
        self._commenting.cancel()

    def spoke(self) -> None:
        """Note that an event has been written."""
        self._spoken = True

    async def _comment(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client has left: the writer of the events gets the error
            while True:
                self._spoken = False
                await asyncio.sleep(self._silence_s)
                if not self._spoken:
                    await self._response.write(COMMENT)
