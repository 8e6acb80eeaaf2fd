"""Conversations with only the roles that a model's chat template knows.

Agents send instructions as `developer`, more than once and in the middle of a conversation, even to models whose
templates raise an error for that or silently drop the message.
"""

import functools
from typing import Any

import jinja2
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.renderers.online_renderer import OnlineRenderer

SYSTEM, DEVELOPER = "system", "developer"
_PROBE = "melld-probe"


class Renderer(OnlineRenderer):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """vLLM's class, which passes every role to the template unchanged."""

    async def preprocess_chat(self, request: Any, messages: list[Any], *arguments: Any, **named: Any) -> Any:
        """See vLLM."""
        if any(role == DEVELOPER or (role == SYSTEM and place) for place, role in enumerate(map(_role, messages))):
            messages = in_known_roles(
                messages, knows_developer=self._knows_developer, is_system_first=self._is_system_first
            )
        return await super().preprocess_chat(request, messages, *arguments, **named)

    @functools.cached_property
    def _is_system_first(self) -> bool:
        """Return True if the template rejects a system message that is not the first."""
        found = AnthropicServingMessages._should_merge_inline_system(self)  # noqa: SLF001 - as vLLM serves /v1/messages
        return bool(found)

    @functools.cached_property
    def _knows_developer(self) -> bool:
        """Return True if the template renders developer messages."""
        said = [{"role": DEVELOPER, "content": _PROBE}, {"role": "user", "content": "Hello"}]
        try:
            tokenizer = self.renderer.get_tokenizer()
            shown = tokenizer.apply_chat_template(said, chat_template=self.chat_template, tokenize=False)
        except (jinja2.TemplateError, ValueError, TypeError, LookupError):
            return False
        return _PROBE in str(shown)


def in_known_roles(messages: list[Any], *, knows_developer: bool, is_system_first: bool) -> list[Any]:
    """Return the messages with `developer`, unless known, as `system`, and all system messages merged at the start.

    Merge only if the template demands it: each new one changes the start of the prompt, and so misses the prefix cache.
    """
    if not knows_developer:
        messages = [one | {"role": SYSTEM} if _role(one) == DEVELOPER else one for one in messages]
    instructions = [one for one in messages if _role(one) == SYSTEM]
    if not is_system_first or not instructions or instructions == messages[:1]:
        return messages
    text = "\n\n".join(filter(None, map(_text, instructions)))
    return [{"role": SYSTEM, "content": text}, *(one for one in messages if _role(one) != SYSTEM)]


def _role(message: Any) -> Any:
    return message.get("role")


def _text(message: Any) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)
