"""Performs calls: passes a parsed request to vLLM's serving classes and returns their result.  Sends nothing."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from multidict import CIMultiDict
from pydantic import BaseModel
from starlette.datastructures import State
from starlette.responses import Response, StreamingResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from melld.api.answers import JSON, Dialect, Refusal
from melld.api.calls import CALLS, POOLING, Call
from melld.api.error_mapping import ServingFault
from melld.api.guards.request import Trust
from melld.api.long_answers import LongAnswer
from melld.api.served_tier import name_in_body
from melld.api.streams import begun
from melld.engine.frontend.caller import caller
from melld.engine.frontend.moulds import KnownMoulds
from melld.engine.frontend.outlet import Outlet
from melld.engine.frontend.turns import Turns
from melld.scheduler.priorities import Tier

# The headers that vLLM may see: tracing and session ids.  vLLM's own (a priority, a data-parallel rank) are not for
# clients.
FORWARDED_HEADERS = ("traceparent", "tracestate", "X-Session-ID")


def forwarded(headers: Any, request_id: str) -> SimpleNamespace:
    """Return a stand-in for the Starlette request of vLLM's classes: some headers, and room for their state."""
    chosen = CIMultiDict({name: headers[name] for name in FORWARDED_HEADERS if name in headers})
    chosen["X-Request-Id"] = request_id
    return SimpleNamespace(headers=chosen, state=SimpleNamespace())


class Result(msgspec.Struct, frozen=True):
    """A call's result: a whole body, or a started stream."""

    body: bytes = b""
    headers: dict[str, str] = msgspec.field(default_factory=lambda: {"Content-Type": JSON})
    stream: AsyncGenerator[str, None] | None = None


def handler_of(call: Call, serving: State) -> Any:
    """Return the serving class behind a call.

    Raises:
        Refusal: 400 if this model has none.
    """
    handler = getattr(serving, call.serving, None)
    if handler is None:
        served = [path for path, one in CALLS.items() if one.engine and getattr(serving, one.serving, None)]
        pools = call.serving in POOLING and "/v1/completions" in served
        instead = "one served with [model.vllm] runner = 'pooling'" if pools else "another model"
        message = f"this model does not support the {call.api} API: use {instead}; it supports {', '.join(served)}"
        raise Refusal(400, message, code="model_not_supported", param="model")
    return handler


def is_stream(call: Call, parsed: BaseModel) -> bool:
    """Return True if the request asks for a stream of events."""
    return call.streams and bool(parsed.stream)  # type: ignore[attr-defined]


def outlet_of(call: Call, handler: Any, parsed: BaseModel, known: KnownMoulds) -> Outlet | None:
    """Return the outlet for a stream, or None if its events hold more than text.  One that echoes learns by itself."""
    if call.hears or getattr(parsed, "return_token_ids", False) or getattr(parsed, "background", False):
        return None
    parser = getattr(handler, "parser_cls", None) or getattr(handler, "parser", None)
    return Outlet(
        is_raw=parser is None and not getattr(handler, "use_harmony", False),
        known=KnownMoulds() if getattr(parsed, "echo", False) else known,
        keeps_texts=call.dialect is Dialect.RESPONSES or getattr(handler, "enable_log_outputs", False),
    )


async def perform(
    call: Call, handler: Any, parsed: BaseModel, request: SimpleNamespace, turns: Turns, tier: Tier
) -> Result:
    """Let the call's serving class handle a parsed request, and name its tier in the answer.

    Raises:
        Refusal, vLLM's errors: see `melld.api.error_mapping`.
    """
    long = LongAnswer(turns)
    handler = handler if is_stream(call, parsed) else long.leaving_out(handler)
    serve = getattr(handler, call.method) if call.method else handler
    if call.hears:
        serve = functools.partial(serve, parsed.file.file.read())  # type: ignore[attr-defined]
    result = await serve(parsed, request)
    if isinstance(result, ErrorResponse):
        raise ServingFault(result)
    if isinstance(result, BaseModel):
        name_in_body(result, tier)
        return Result(await long.encode(result, call.dump))
    if isinstance(result, StreamingResponse):  # vectors as bytes, whole; the header says where each begins
        headers = {name: result.headers[name] for name in ("content-type", "metadata") if name in result.headers}
        pieces: list[Any] = [piece async for piece in result.body_iterator]
        return Result(b"".join(pieces), headers)
    if isinstance(result, Response):
        return Result(cast("bytes", result.body))
    return Result(stream=await begun(result, call.dialect, None if call.hears else tier, caller().outlet))


def trust_of(call: Call, serving: State) -> Trust:
    """Return what the operator's `[model.vllm]` options allow clients."""
    arguments = serving.args
    return Trust(
        chat_template=bool(getattr(arguments, "trust_request_chat_template", False)),
        multimodal_kwargs=bool(getattr(arguments, "trust_request_mm_kwargs", False)),
        local_media=bool(getattr(arguments, "allowed_local_media_path", "")),
        no_tools_because=getattr(arguments, "no_tools_because", "") if call.engine else "",
    )


async def give_up(work: asyncio.Task[Result]) -> None:
    """Cancel a call, so that its request is aborted; do nothing if it has ended."""
    work.cancel()
    with contextlib.suppress(Exception, asyncio.CancelledError):
        if (stream := (await work).stream) is not None:
            await stream.aclose()
