"""Chat completions: reasoning under both its names, any effort level, and the bytes of every token with logprobs."""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs, ChatMessage
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from melld.api.serving.requests import ChatCompletionRequest
from melld.api.serving.streaming import Streaming
from melld.api.serving.telling import tell_twice
from melld.api.serving.thinking import taken_effort
from melld.engine.frontend.tokens.texts import true_bytes


class Chats(Streaming, OpenAIServingChat):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """vLLM's class, which names the reasoning only `reasoning`, and does not handle tokens that split a character."""

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: Any = None) -> Any:
        """See vLLM."""
        request.reasoning_effort = await taken_effort(self, request.reasoning_effort)
        return await super().create_chat_completion(request, raw_request)

    def _create_chat_message(self, *arguments: Any, **named: Any) -> ChatMessage:
        message = super()._create_chat_message(*arguments, **named)
        tell_twice(message)
        return message

    def _create_chat_logprobs(self, **arguments: Any) -> ChatCompletionLogProbs:
        made = super()._create_chat_logprobs(**arguments)
        for entry in made.content or ():
            for one in (entry, *entry.top_logprobs):
                one.bytes = true_bytes(one.bytes)
        return made
