"""The error for a prompt that fills the model's context to the last token.

vLLM says that `max_tokens` must be at least 1, though nobody asked for 0, and something else on `/v1/responses`.
Clients shorten a conversation if the error mentions the context length.
"""

from typing import Any

from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import serving as completion
from vllm.entrypoints.openai.responses import serving as responses
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import VLLMValidationError


def tell_lengths() -> None:
    """Make the classes that generate report the length of a prompt that leaves no room for output."""
    for module in (chat, completion, responses):
        module.get_max_tokens = _room_for_output


def _room_for_output(max_model_len: int, max_tokens: int | None, input_length: int, *rest: Any, **named: Any) -> int:
    """Return vLLM's limit of output tokens.

    Raises:
        VLLMValidationError: there is no room for any.
    """
    room: int = get_max_tokens(max_model_len, max_tokens, input_length, *rest, **named)
    if room < 1 and (max_tokens is None or max_tokens > 0):
        raise VLLMValidationError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{input_length} input tokens, which leaves no room for output. Please reduce the length of the prompt.",
            parameter="input_tokens",
            value=input_length,
        )
    return room
