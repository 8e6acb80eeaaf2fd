"""Streams of server-sent events on their way from vLLM's serving classes to a socket.

vLLM yields ready text.  What it leaves to be done here: an error that it would write into a stream is raised instead,
so that one before the head becomes an HTTP status and one after it an `error` event in the endpoint's dialect; and a
stream that is given up frees its engine.  The head goes out with the first token, or soon after the request has been
admitted: from then on only a fault of the server's, or a full machine, can end it.
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
from melld.api.error_mapping import ServingFault

HEAD_AFTER_S = 1.0
"""How long an admitted request may still be answered with a status, if it has no token: workers find some errors."""
COMMENT = b": keep-alive\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# `response.created` and `response.in_progress` come before the engine has seen the request.
_HELD_BACK = {Dialect.RESPONSES: 2}
_STREAMING = (
    "openai_serving_chat",
    "openai_serving_completion",
    "openai_serving_responses",
    "anthropic_serving_messages",
)


def make_streams_raise(serving: State) -> None:
    """Have vLLM's serving classes raise the errors that they would write into their streams, and log none of them.

    All of theirs go through `create_streaming_error_response` (vllm.entrypoints.generate.base.serving).
    """
    for name in _STREAMING:
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


async def begun(stream: AsyncGenerator[Any, None], dialect: Dialect) -> AsyncGenerator[str, None]:
    """The stream, once it has said something: until then its errors are raised from here.

    Raises:
        ServingFault, or what the stream raised: nothing has been sent yet.
    """
    held: list[str] = []
    try:
        async for item in stream:
            held.append(_text(item, dialect))
            if len(held) > _HELD_BACK.get(dialect, 0):
                break
    except BaseException:
        await stream.aclose()
        raise
    return _go_on(held, stream, dialect)


async def _go_on(held: list[str], stream: AsyncGenerator[Any, None], dialect: Dialect) -> AsyncGenerator[str, None]:
    try:
        for text in held:
            yield text
        async for item in stream:
            yield _text(item, dialect)
    finally:
        await stream.aclose()


def _text(item: Any, dialect: Dialect) -> str:
    """One event as text; `ServingFault` if it is an error (the Anthropic converter lets none pass as an exception)."""
    if dialect is Dialect.RESPONSES:
        return f"event: {item.type}\ndata: {item.model_dump_json(by_alias=True)}\n\n"
    if dialect is Dialect.ANTHROPIC and item.startswith("event: error"):
        error = json.loads(item.partition("data:")[2])["error"]
        raise ServingFault(ErrorResponse(error=ErrorInfo(message=error["message"], type=error["type"], code=500)))
    text: str = item
    return text


async def until_head(work: asyncio.Task[Any], admitted: asyncio.Event) -> None:
    """Wait until a stream's head may go: `work` (up to the first token) is done, or its request admitted for a while.

    Raises:
        What `work` raised: nothing has been sent yet.
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
    """Writes a comment into a stream that has said nothing for `silence_s`.  A context manager around its writing."""

    def __init__(self, response: web.StreamResponse, silence_s: float) -> None:
        self._response = response
        self._silence_s = silence_s
        self._spoken = False
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def __enter__(self) -> "KeepAlive":
        self._arm()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            self._writing.cancel()

    def spoke(self) -> None:
        """Note that an event has been written."""
        self._spoken = True

    def _arm(self) -> None:
        if self._silence_s < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(self._silence_s, self._look)

    def _look(self) -> None:
        if not self._spoken and (self._writing is None or self._writing.done()):
            self._writing = asyncio.ensure_future(self._write())
        self._spoken = False
        self._arm()

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client has gone: whoever writes the events is told
            await self._response.write(COMMENT)
