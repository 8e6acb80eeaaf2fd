"""Calls of many texts, in pieces: to tokens, to the workers, and into an answer.

vLLM begins everything for all texts of a call at once, looks through all of them whenever one is done, and writes the
answer in one go.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.datastructures import State
from starlette.responses import JSONResponse
from vllm.entrypoints.pooling.base import serving as pooling

from melld.engine.frontend.caller import caller

Item = TypeVar("Item")
AT_ONCE = 256
"""Texts of a call that wait or are with workers: more would take the queue from others."""
_SERVING = ("serving_embedding", "serving_classification", "serving_pooling", "serving_scores")


def serve_many_texts(serving: State) -> None:
    """Have vLLM's pooling classes take the texts of a call little by little."""
    pooling.merge_async_iterators = some_at_a_time
    for handler in (getattr(serving, name, None) for name in _SERVING):
        if handler is not None:
            handler.json_response_cls = InPieces
            processors = getattr(handler, "io_processors", None) or {"": handler.io_processor}
            for processor in processors.values():
                processor.render_async = _limited(processor.render_async)


def _limited(render: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    """Limit how many texts of a call wait for the thread that makes tokens: those of other calls go between them."""

    async def render_one(parameters: Any) -> Any:
        async with caller().rendering:
            return await render(parameters)

    return render_one


async def some_at_a_time(*iterators: AsyncGenerator[Item, None]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all iterators as they come, each with the number of its iterator.

    At most `AT_ONCE` iterators have begun and not ended.
    """
    found: asyncio.Queue[tuple[int, Item] | asyncio.Task[None]] = asyncio.Queue()
    waiting = iter(enumerate(iterators))

    async def iterate() -> None:
        for number, iterator in waiting:
            async for item in iterator:
                found.put_nowait((number, item))

    running = {asyncio.create_task(iterate()) for _ in itertools.islice(iterators, AT_ONCE)}
    for task in running:
        task.add_done_callback(found.put_nowait)
    try:
        while running:
            event = await found.get()
            if isinstance(event, tuple):
                yield event
            else:
                running.discard(event)
                event.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class InPieces(JSONResponse):
    """JSON of many lists of numbers, written one by one: other threads go on between two."""

    def render(self, content: Any) -> bytes:
        """Return the JSON."""
        return _json(content).encode()


_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=lambda array: array.tolist()
).encode


def _json(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join([f"{_encode(name)}:{_json(one)}" for name, one in value.items()]) + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[" + ",".join(map(_json, value)) + "]"
    return _encode(value)


InPieces.__name__ = "ORJSONResponse"  # by which vLLM knows a class that takes arrays
