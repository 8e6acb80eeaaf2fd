"""Anthropic's messages, as in Anthropic's own API.

An answer continues a final assistant message, `thinking` turns thinking on, ids begin with `msg_`, and a stream begins
with the number of cached tokens.
"""

import contextlib
import copy
import json
from collections.abc import AsyncGenerator
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from melld.api.answers import Dialect, bad
from melld.api.serving.requests import ChatCompletionRequest
from melld.api.serving.streaming import Streaming
from melld.api.serving.thinking import taken_effort
from melld.api.streams import begun
from melld.errors import UnusableToolCall

_CHAT, _MESSAGE = "chatcmpl-", "msg_"
_DATA = "data: "
_THOUGHT = '"content_block":{"type":"thinking","thinking":""'
"""In the event that begins a thinking block.  The model's text cannot contain it: its quotes are escaped."""


class Messages(Streaming, AnthropicServingMessages):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """vLLM's class, which would start a new turn, and uses a chat's ids."""

    @classmethod
    def to_chat_completion_request(
        cls, anthropic_request: AnthropicMessagesRequest | AnthropicCountTokensRequest, **arguments: Any
    ) -> ChatCompletionRequest:
        """See vLLM.

        Raises:
            Refusal: 400, the last message cannot be continued.
        """
        chat: ChatCompletionRequest = super().to_chat_completion_request(anthropic_request, **arguments)
        chat.__class__ = ChatCompletionRequest
        if anthropic_request.thinking is not None:
            chat.thinking = anthropic_request.thinking.model_dump()
        if not chat.tools:
            chat.tool_choice = "none"  # as without tools: no parser looks for calls
        last = anthropic_request.messages[-1]
        if last.role == "assistant":
            blocks = [] if isinstance(last.content, str) else last.content
            if any(block.type == "tool_use" for block in blocks):
                raise bad("messages", "a tool_use must be followed by a message with its tool_result")
            text = last.content if isinstance(last.content, str) else "".join(block.text or "" for block in blocks)
            _go_on(chat, text)
        return chat

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: Any = None) -> Any:
        """See vLLM, which refuses a thinking budget for a model that does not think.

        Raises:
            ServingFault: in the stream, where vLLM would report a failed validation of its text.
        """
        request.reasoning_effort = await taken_effort(self, request.reasoning_effort)
        reasoning = self.engine_client.vllm_config.reasoning_config
        if reasoning is None or not reasoning.enabled:
            request.thinking_token_budget = None
        result = await super().create_chat_completion(request, raw_request)
        return result if isinstance(result, BaseModel) else await begun(result, Dialect.OPENAI)

    def messages_full_converter(self, generator: ChatCompletionResponse) -> Any:
        """See vLLM, which blames the request for invalid arguments of the model's tool call.

        Raises:
            UnusableToolCall: the arguments are not an object.
        """
        for call in generator.choices[0].message.tool_calls:
            if not _is_object(call.function.arguments):
                raise UnusableToolCall(call.function.name)
        return super().messages_full_converter(generator)

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """See vLLM.

        Raises:
            Refusal: 400, vLLM would start a new turn.
        """
        if request.continue_final_message and self.online_renderer.use_harmony:
            raise bad("messages", "this model cannot continue an assistant message: end with a user message")
        return await super().render_chat_request(request)

    def _make_parser(self, request: ChatCompletionRequest, *arguments: Any) -> Any:
        """Return a parser that treats what continues an answer as answer, not as reasoning."""
        own = copy.copy(self)
        if request.continue_final_message:
            own.parser_cls = type(self.parser_cls.__name__, (self.parser_cls,), {"reasoning_parser_cls": None})
        return super(Messages, own)._make_parser(request, *arguments)

    def _engine_reasoning_kwargs(self, request: ChatCompletionRequest, *arguments: Any) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._engine_reasoning_kwargs(request, *arguments)
        return kwargs | {"reasoning_ended": True} if request.continue_final_message else kwargs

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, results: Any, request_id: str, *more: Any, **named: Any
    ) -> Any:
        """See vLLM."""
        message_id, counted = request_id.replace(_CHAT, _MESSAGE, 1), _counted(results, [])
        return await super().chat_completion_full_generator(request, counted, message_id, *more, **named)

    async def chat_completion_stream_generator(
        self, request: ChatCompletionRequest, results: Any, request_id: str, *more: Any, **named: Any
    ) -> AsyncGenerator[str, None]:
        """See vLLM, which reports the cached tokens only at the end of a stream."""
        message_id, cached = request_id.replace(_CHAT, _MESSAGE, 1), list[int]()
        counted = _counted(results, cached)
        events = super().chat_completion_stream_generator(request, counted, message_id, *more, **named)
        is_first = self.enable_prompt_tokens_details
        async with contextlib.aclosing(events):
            async for event in events:
                yield _with_cached(event, cached[0]) if is_first else event
                is_first = False

    async def message_stream_converter(self, generator: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """See vLLM, whose thinking blocks begin without the signature that Anthropic's own clients require."""
        events = super().message_stream_converter(generator)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event.replace(_THOUGHT, f'{_THOUGHT},"signature":""', 1) if _THOUGHT in event else event


async def _counted(results: Any, cached: list[int]) -> AsyncGenerator[Any, None]:
    """Pass the results on, each with both kinds of cached tokens counted, and note the first count."""
    async with contextlib.aclosing(results):
        async for result in results:
            result.num_cached_tokens = result.num_cached_tokens or 0
            result.num_cache_creation_tokens = result.num_cache_creation_tokens or 0
            if not cached:
                cached.append(result.num_cached_tokens)
            yield result


def _with_cached(event: str, cached_tokens: int) -> str:
    """Return a chat's first event with the cached tokens in its usage."""
    said = json.loads(event.removeprefix(_DATA))
    said["usage"]["prompt_tokens_details"] = {"cached_tokens": cached_tokens, "created_cache_tokens": 0}
    return f"{_DATA}{json.dumps(said)}\n\n"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _go_on(chat: ChatCompletionRequest, text: str) -> None:
    """Make the chat continue its last message, unless that is empty."""
    if text != text.rstrip():
        raise bad("messages", "the final assistant content cannot end with trailing whitespace")
    if text:
        chat.messages[-1]["content"] = text
        chat.add_generation_prompt, chat.continue_final_message = False, True
    elif not chat.messages[-1].get("reasoning"):
        chat.messages.pop()
