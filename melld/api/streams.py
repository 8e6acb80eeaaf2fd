"""Streams of server-sent events on their way from vLLM's serving classes to a socket.

vLLM yields ready text.  What it leaves to be done here: an error that it reports before the first token becomes an HTTP
status (it would be a 200 with an error inside), one that it reports later ends the stream with an `error` event in the
endpoint's dialect, and a stream that is given up frees its engine.
"""

import json
from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from melld.api.answers import Answer, Dialect
from melld.api.error_mapping import answer_in
from melld.errors import MelldError

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# `response.created` and `response.in_progress` come before the engine has seen the request.
_HELD_BACK = {Dialect.RESPONSES: 2}


class StreamFault(MelldError):
    """vLLM reported an error as a piece of its stream."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.message)
        self.answer = answer


async def begun(
    stream: AsyncGenerator[Any, None], dialect: Dialect, parameters: frozenset[str]
) -> AsyncGenerator[str, None]:
    """The stream, once it has said something: until then its errors are raised from here.

    Raises:
        StreamFault, or what the stream raised: nothing has been sent yet.
    """
    held: list[str] = []
    try:
        async for item in stream:
            held.append(_text(item, dialect, parameters))
            if len(held) > _HELD_BACK.get(dialect, 0):
                break
    except BaseException:
        await stream.aclose()
        raise
    return _go_on(held, stream, dialect, parameters)


async def _go_on(
    held: list[str], stream: AsyncGenerator[Any, None], dialect: Dialect, parameters: frozenset[str]
) -> AsyncGenerator[str, None]:
    try:
        for text in held:
            yield text
        async for item in stream:
            yield _text(item, dialect, parameters)
    finally:
        await stream.aclose()


def _text(item: Any, dialect: Dialect, parameters: frozenset[str]) -> str:
    """One event as text; `StreamFault` if it is an error."""
    if dialect is Dialect.RESPONSES:
        return f"event: {item.type}\ndata: {item.model_dump_json(by_alias=True)}\n\n"
    if item.startswith(('data: {"error"', "event: error")):
        raise StreamFault(_answer_inside(item, parameters))
    text: str = item
    return text


def _answer_inside(event: str, parameters: frozenset[str]) -> Answer:
    fields = json.loads(event.partition("data:")[2])["error"]
    status = fields.get("code", 500)
    error = ErrorInfo(message=fields["message"], type=fields["type"], param=fields.get("param"), code=status)
    return answer_in(ErrorResponse(error=error), parameters)
