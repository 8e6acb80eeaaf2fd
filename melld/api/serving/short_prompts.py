"""Tokenizes short prompts on the event loop: vLLM hands each to threads twice, which takes longer than the work itself.

vLLM's own synchronous functions do it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.renderers.base import BaseRenderer

SHORT = 2000
"""Maximum characters of a short prompt, before its template."""
MESSAGES = 20
_PLAIN_KEYS = {"role", "content"}


def at_once(kind: type[BaseRenderer]) -> type[BaseRenderer]:
    """Return a subclass of vLLM's renderer that handles short prompts synchronously."""

    class AtOnce(kind):  # type: ignore[misc]
        async def render_chat_async(
            self, conversations: Sequence[Any], chat_params: Any, *arguments: Any, **named: Any
        ) -> Any:
            given = chat_params.chat_template_kwargs.values()
            is_plain = all(value is None or isinstance(value, str | int) for value in given)
            if is_plain and _is_short(message for conversation in conversations for message in conversation):
                return self.render_chat(conversations, chat_params, *arguments, **named)
            return await super().render_chat_async(conversations, chat_params, *arguments, **named)

        async def render_cmpl_async(self, prompts: Sequence[Any], *arguments: Any, **named: Any) -> Any:
            are_texts = all(isinstance(prompt, dict) and prompt.keys() == {"prompt"} for prompt in prompts)
            if are_texts and _is_short({"content": prompt["prompt"]} for prompt in prompts):
                return self.render_cmpl(prompts, *arguments, **named)
            return await super().render_cmpl_async(prompts, *arguments, **named)

    return AtOnce


def _is_short(messages: Iterable[Any]) -> bool:
    """Return True for a few messages with little text."""
    left, count = SHORT, 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str) or message.keys() - _PLAIN_KEYS:
            return False
        left, count = left - len(content), count + 1
    return left >= 0 and count <= MESSAGES
