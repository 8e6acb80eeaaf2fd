"""Anthropic's messages: an answer goes on from an assistant's last message, as in Anthropic's own API."""

import copy
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from melld.api.answers import bad


class Messages(AnthropicServingMessages):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """vLLM's class, which would begin another turn."""

    @classmethod
    def to_chat_completion_request(
        cls, anthropic_request: AnthropicMessagesRequest | AnthropicCountTokensRequest, **arguments: Any
    ) -> ChatCompletionRequest:
        """See vLLM.

        Raises:
            Refusal: 400, nothing can go on from the last message.
        """
        chat = super().to_chat_completion_request(anthropic_request, **arguments)
        last = anthropic_request.messages[-1]
        if last.role == "assistant":
            blocks = [] if isinstance(last.content, str) else last.content
            if any(block.type == "tool_use" for block in blocks):
                raise bad("messages", "a tool_use must be followed by a message with its tool_result")
            text = last.content if isinstance(last.content, str) else "".join(block.text or "" for block in blocks)
            _go_on(chat, text)
        return chat

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """See vLLM.

        Raises:
            Refusal: 400, vLLM would begin another turn.
        """
        if request.continue_final_message and self.online_renderer.use_harmony:
            raise bad("messages", "this model cannot go on from an assistant's message: end with a user's")
        return await super().render_chat_request(request)

    def _make_parser(self, request: ChatCompletionRequest, *arguments: Any) -> Any:
        """Return a parser that takes what follows an answer's first words for answer, not for reasoning."""
        own = copy.copy(self)
        if request.continue_final_message:
            own.parser_cls = type(self.parser_cls.__name__, (self.parser_cls,), {"reasoning_parser_cls": None})
        return super(Messages, own)._make_parser(request, *arguments)

    def _engine_reasoning_kwargs(self, request: ChatCompletionRequest, *arguments: Any) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._engine_reasoning_kwargs(request, *arguments)
        return kwargs | {"reasoning_ended": True} if request.continue_final_message else kwargs


def _go_on(chat: ChatCompletionRequest, text: str) -> None:
    """Have the chat go on from its last message, unless that says nothing yet."""
    if text != text.rstrip():
        raise bad("messages", "the final assistant content cannot end with trailing whitespace")
    if text:
        chat.messages[-1]["content"] = text
        chat.add_generation_prompt, chat.continue_final_message = False, True
    elif not chat.messages[-1].get("reasoning"):
        chat.messages.pop()
