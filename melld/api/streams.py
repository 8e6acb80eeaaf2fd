"""Streams of server-sent events on their way from vLLM's serving classes to a socket.

vLLM yields ready text.  An error that it would write into a stream is raised instead (`serving.streaming`): before
the head it becomes an HTTP status, after it an `error` event in the endpoint's dialect.  A cancelled stream aborts its
request.

The head is sent with the first token, or soon after the request has been admitted: from then on only a fault of the
server, or a full machine, can end the stream.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from melld.api.answers import Dialect
from melld.api.connections.exchange import Exchange
from melld.api.error_mapping import ServingFault
from melld.api.served_tier import name_in_event
from melld.engine.frontend.outlet import Outlet
from melld.scheduler.priorities import Tier

HEAD_AFTER_S = 1.0
"""How long an admitted request without a token can still be answered with a status: workers find some errors."""
COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""Keeps a stream of Anthropic's alive: its clients may wait for events."""
# `response.created` and `response.in_progress` come before the engine has seen the request.
_HELD_BACK = {Dialect.RESPONSES: 2}


async def begun(
    stream: AsyncGenerator[Any, None], dialect: Dialect, tier: Tier | None = None, outlet: Outlet | None = None
) -> AsyncGenerator[str, None]:
    """Return the stream after its first event, with the tier in its events; raise its errors until then.

    Raises:
        ServingFault, or any error of the stream: nothing has been sent yet.
    """
    held: list[str] = []
    texts = _texts(stream, dialect, tier, outlet)
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(texts.aclose)
        async for text in texts:
            held.append(text)
            if len(held) > _HELD_BACK.get(dialect, 0):
                break
        undo.pop_all()
    return _go_on(held, texts)


async def _go_on(held: list[str], texts: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(texts):
        for text in held:
            yield text
        async for text in texts:
            yield text


async def _texts(
    stream: AsyncGenerator[Any, None], dialect: Dialect, tier: Tier | None, outlet: Outlet | None
) -> AsyncGenerator[str, None]:
    """Yield a serving class's events as text, except those that the outlet already wrote."""
    async with contextlib.aclosing(stream):
        async for item in stream:
            if outlet is None:
                yield _text(item, dialect, tier)
            elif not outlet.drops_event():
                number = None
                if dialect is Dialect.RESPONSES:
                    number = item.sequence_number = item.sequence_number + outlet.ahead
                text = _text(item, dialect, tier)
                outlet.heard(text, number)
                yield text


def _text(item: Any, dialect: Dialect, tier: Tier | None) -> str:
    """Return an event as text; raise `ServingFault` for an error event (the Anthropic converter never raises)."""
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
    """Wait until a stream's head may be sent: `work` (up to the first token) is done, or was admitted long enough ago.

    Raises:
        Any error of `work`: nothing has been sent yet.
    """
    work.add_done_callback(lambda _: admitted.set())  # also if it ends without
    await admitted.wait()
    if not work.done():
        await asyncio.wait({work}, timeout=HEAD_AFTER_S)
    if work.done():
        work.result()


class KeepAlive:
    """Writes a comment or a ping into a stream after `silence_s` without events.  A context manager."""

    def __init__(self, exchange: Exchange, silence_s: float) -> None:
        self._exchange = exchange
        self._silence_s = silence_s
        self._sign = PING if exchange.dialect is Dialect.ANTHROPIC else COMMENT

    def __enter__(self) -> None:
        self._wait()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._written_bytes = self._exchange.request.writer.output_size
        self._timer = asyncio.get_running_loop().call_later(self._silence_s, self._look)

    def _look(self) -> None:
        if self._exchange.request.writer.output_size == self._written_bytes:
            self._exchange.comment(self._sign)
        self._wait()
