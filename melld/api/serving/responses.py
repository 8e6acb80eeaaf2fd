"""Responses that report truncation and enforce the tool choice.

They see the whole conversation: tool calls and reasoning of the previous response, and reasoning the client has kept.
"""

import contextlib
import copy
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from openai.types.responses import ResponseIncompleteEvent, ResponseOutputItemDoneEvent
from openai.types.responses.response_output_text import Logprob
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_chat_messages_with_tool_call
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import CompletionOutput

from melld.api.answers import bad
from melld.api.serving.input_items import close, is_kept_by_client, readable
from melld.api.serving.requests import ResponsesRequest
from melld.api.serving.streaming import Streaming
from melld.api.serving.thinking import taken_effort
from melld.engine.frontend.tokens.texts import true_bytes


class _Incomplete(ResponseIncompleteEvent):
    response: ResponsesResponse


class Responses(Streaming, OpenAIServingResponses):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """vLLM's class, which reports a truncated answer as complete, and drops the previous response's tool calls."""

    async def create_responses(self, request: ResponsesRequest, raw_request: Any = None) -> Any:
        """See vLLM."""
        if request.reasoning is not None:
            request.reasoning.effort = await taken_effort(self, request.reasoning.effort)
        if isinstance(request.input, list):
            request.input = readable(request.input)
        return await super().create_responses(request, raw_request)

    async def _render_resolved_response_inputs(
        self, request: ResponsesRequest, prev_response: ResponsesResponse | None, **named: Any
    ) -> Any:
        if prev_response is not None and not self.use_harmony:
            said = construct_chat_messages_with_tool_call(readable(prev_response.output))
            self.msg_store[prev_response.id] = [*self.msg_store.get(prev_response.id, ()), *said]
            prev_response = prev_response.model_copy(update={"output": []})
        return await super()._render_resolved_response_inputs(request, prev_response, **named)

    async def responses_full_generator(self, request: ResponsesRequest, *more: Any, **named: Any) -> Any:
        """See vLLM."""
        made = await super().responses_full_generator(request, *more, **named)
        if is_kept_by_client(request):
            for item in getattr(made, "output", ()):
                close(item)
        return made

    def _validate_generator_input(self, _engine_input: Any) -> None:
        """Leave it to `lengths`, whose message says more."""

    def _validate_create_responses_input(self, request: ResponsesRequest) -> ErrorResponse | None:
        choice = request.tool_choice
        kind = choice if isinstance(choice, str) else choice.type
        if kind not in ("none", "auto", "required", "function", "custom") and not self.use_harmony:
            raise bad("tool_choice", f"tool_choice {kind} is not supported: use auto, required, or name a function")
        return super()._validate_create_responses_input(request)

    def _make_response_output_items(
        self, request: ResponsesRequest, final_output: CompletionOutput, *more: Any, **named: Any
    ) -> list[Any]:
        items: list[Any] = super()._make_response_output_items(request, final_output, *more, **named)
        if items and _is_cut(final_output):
            items[-1].status = "incomplete"
        return items

    async def _process_simple_streaming_events(
        self, request: ResponsesRequest, sampling_params: Any, result_generator: Any, context: Any, *more: Any
    ) -> AsyncGenerator[Any, None]:
        """Mark the last item of a truncated answer as incomplete; each is held until it is known not to be the last."""
        own, results = self._with_unsaid(result_generator, context)
        events = super(Responses, own)._process_simple_streaming_events(
            request, sampling_params, results, context, *more
        )
        held: ResponseOutputItemDoneEvent | None = None
        async with contextlib.aclosing(results), contextlib.aclosing(events):
            async for event in events:
                if held is not None:
                    yield held
                    held = None
                if isinstance(event, ResponseOutputItemDoneEvent) and _is_cut(context.last_output.outputs[0]):
                    held = event
                else:
                    yield event
        if held is not None:
            item: Any = held.item
            item.status = "incomplete"
            yield held

    def _with_unsaid(
        self, result_generator: AsyncIterator[Any], context: Any
    ) -> tuple["Responses", AsyncGenerator[Any, None]]:
        """Return a copy for one stream, and its results, with the logprobs of outputs without text moved to the next.

        A token that is only part of a character adds no text, and vLLM sends nothing for an output without text.
        """
        own, unsaid = copy.copy(self), list[CompletionOutput]()

        async def results() -> AsyncGenerator[Any, None]:
            async for result in result_generator:
                if unsaid and unsaid[-1].text:
                    unsaid.clear()
                unsaid.extend(context.last_output.outputs)
                yield result

        def make(**arguments: Any) -> list[Logprob]:
            tokens = [token for output in unsaid for token in output.token_ids]
            values = [value for output in unsaid for value in output.logprobs or ()]
            unsaid.clear()
            return self._create_response_logprobs(**arguments | {"token_ids": tokens, "logprobs": values})

        own._create_response_logprobs = make  # type: ignore[method-assign]  # noqa: SLF001
        return own, results()

    async def responses_stream_generator(
        self, request: ResponsesRequest, *arguments: Any, **named: Any
    ) -> AsyncGenerator[Any, None]:
        """See vLLM."""
        events = super().responses_stream_generator(request, *arguments, **named)
        is_kept = is_kept_by_client(request)
        async with contextlib.aclosing(events):
            async for event in events:
                if is_kept and isinstance(event, ResponseOutputItemDoneEvent):
                    close(event.item)
                if event.type == "response.completed" and event.response.status == "incomplete":
                    number = event.sequence_number
                    yield _Incomplete(type="response.incomplete", sequence_number=number, response=event.response)
                else:
                    yield event

    def _create_response_logprobs(self, **arguments: Any) -> list[Logprob]:
        made: list[Logprob] = super()._create_response_logprobs(**arguments)
        for entry in made:
            tokens: tuple[Any, ...] = (entry, *entry.top_logprobs)
            for one in tokens:
                one.bytes = true_bytes(one.bytes)
        return made


def _is_cut(output: CompletionOutput) -> bool:
    return bool(output.finish_reason == "length")
