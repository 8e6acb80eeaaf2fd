"""vLLM's requests for conversations, as this API accepts them."""

import dataclasses
from typing import Any

from pydantic import model_validator
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.responses import protocol as responses

from melld.api.serving.input_items import with_types
from melld.api.serving.thinking import Switched


class ChatCompletionRequest(Switched, chat.ChatCompletionRequest):  # type: ignore[misc]  # vLLM is not checked
    """vLLM's request."""


class ResponsesRequest(Switched, responses.ResponsesRequest):  # type: ignore[misc]  # vLLM is not checked
    """vLLM's request, which requires types that OpenAI makes optional, and would add a second begin token."""

    @model_validator(mode="before")
    @classmethod
    def name_types(cls, data: Any) -> Any:
        """Add the types of assistant messages."""
        is_list = isinstance(data, dict) and isinstance(data.get("input"), list)
        return data | {"input": with_types(data["input"])} if is_list else data

    def build_tok_params(self, *arguments: Any) -> Any:
        """See vLLM."""
        return dataclasses.replace(super().build_tok_params(*arguments), add_special_tokens=False)
