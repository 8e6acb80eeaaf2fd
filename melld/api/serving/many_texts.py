"""Calls with many texts, handled in pieces: tokenized, sent to the workers, and written into the answer.

vLLM starts all texts of a call at once, scans all of them whenever one is done, and writes the answer in one go.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, TypeVar

from starlette.datastructures import State
from starlette.responses import JSONResponse
from vllm.entrypoints.pooling.base import serving as pooling
from vllm.utils.async_utils import make_async

Item = TypeVar("Item")
AT_ONCE = 256
"""Maximum of a call's texts that are queued or with workers: more would crowd others out of the queue."""
RENDERED_AT_ONCE = 16
"""Maximum of a call's texts that are being tokenized."""
_SERVING = ("serving_embedding", "serving_classification", "serving_pooling", "serving_scores")


def serve_many_texts(serving: State) -> None:
    """Make vLLM's pooling classes take the texts of a call a few at a time."""
    pooling.merge_async_iterators = some_at_a_time
    pooling.PoolingBaseServing._preprocessing = _preprocess  # noqa: SLF001
    for handler in (getattr(serving, name, None) for name in _SERVING):
        if handler is not None:
            handler.json_response_cls = InPieces


async def _preprocess(handler: Any, processor: Any, context: Any) -> None:
    """Tokenize the texts of a call in vLLM's thread for that, where those of other calls can run in between."""
    make = make_async(processor.get_request_factory_online, executor=handler.renderer._executor)  # noqa: SLF001
    requests, context.engine_inputs = await make(context), []
    if not requests:
        raise ValueError("You must pass at least one prompt")
    for start in range(0, len(requests), RENDERED_AT_ONCE):
        some = requests[start : start + RENDERED_AT_ONCE]
        context.engine_inputs += await asyncio.gather(*map(processor.render_async, some))


async def some_at_a_time(*iterators: AsyncGenerator[Item, None]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all iterators as they come, each with the number of its iterator.

    At most `AT_ONCE` iterators run at a time.
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
    """JSON of many lists of numbers, encoded one by one so that other threads can run in between."""

    def render(self, content: Any) -> Any:
        """Return the JSON, as a `bytearray`."""
        joined = bytearray()  # tens of megabytes: each copy would block all threads
        for piece in _pieces(content):
            joined += piece.encode()
        return joined


_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=lambda array: array.tolist()
).encode


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for number, (name, one) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_encode(name)}:"
            yield from _pieces(one)
        yield "}" if value else "{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for number, one in enumerate(value):
            yield "," if number else "["
            yield from _pieces(one)
        yield "]"
    else:
        yield _encode(value)


InPieces.__name__ = "ORJSONResponse"  # vLLM recognizes a class that takes arrays by this name
