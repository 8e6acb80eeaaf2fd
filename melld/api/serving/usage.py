"""Completions whose usage is counted as OpenAI does.

Of several prompts vLLM reports the cached tokens of one only, and it counts the token generated to score a prompt.
"""

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.outputs import RequestOutput

from melld.api.serving.completions import Completions

_DATA = "data: "
_LAST, _DETAILS = '"choices":[]', '"prompt_tokens_details":{'
"""Marks of the event with the usage.  The model's text cannot contain them: its quotes are escaped."""


class CountedCompletions(Completions):
    """Completions that count the cached tokens of all prompts, and no output token for prompts that are only scored."""

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], request: CompletionRequest, *arguments: Any
    ) -> Any:
        """See vLLM, which reads the cached tokens of the last result only."""
        for result in final_res_batch:
            _count_only_wanted(result, request)
        cached = [one.num_cached_tokens for one in final_res_batch if one.num_cached_tokens is not None]
        final_res_batch[-1].num_cached_tokens = sum(cached) if cached else None
        return super().request_output_to_completion_response(final_res_batch, request, *arguments)

    def completion_stream_generator(
        self, request: CompletionRequest, engine_inputs: list[Any], result_generator: Any, *more: Any, **named: Any
    ) -> AsyncGenerator[str, None]:
        """See vLLM, which reads the cached tokens of the first result only."""
        cached: dict[int, int] = {}
        noted = _noted(result_generator, request, cached)
        events: AsyncGenerator[str, None]
        events = super().completion_stream_generator(request, engine_inputs, noted, *more, **named)
        return events if len(engine_inputs) == 1 else _with_all_cached(events, cached)


async def _noted(
    results: AsyncGenerator[tuple[int, RequestOutput], None], request: CompletionRequest, cached: dict[int, int]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Pass the results on, and note the cached tokens of each prompt."""
    async with contextlib.aclosing(results):
        async for index, result in results:
            cached.setdefault(index, result.num_cached_tokens or 0)
            _count_only_wanted(result, request)
            yield index, result


async def _with_all_cached(events: AsyncGenerator[str, None], cached: dict[int, int]) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            if _LAST in event and _DETAILS in event:
                said = json.loads(event.removeprefix(_DATA))
                said["usage"]["prompt_tokens_details"]["cached_tokens"] = sum(cached.values())
                yield f"{_DATA}{json.dumps(said)}\n\n"
            else:
                yield event


def _count_only_wanted(result: RequestOutput, request: CompletionRequest) -> None:
    """Drop the token that a worker has generated although none is wanted."""
    if request.max_tokens == 0:
        for output in result.outputs:
            output.token_ids = []
