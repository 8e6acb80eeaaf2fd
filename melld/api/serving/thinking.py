"""Reads whether and how hard a request wants the model to reason, in the terms of several services.

Owns the switch: templates know it as `enable_thinking` (Qwen, GLM, Gemma) or `thinking` (DeepSeek, Granite, Kimi), and
clients set either, a `thinking` object (Anthropic, DeepSeek, GLM), or an effort.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

SWITCHES = ("enable_thinking", "thinking")
TYPES = {"enabled": True, "adaptive": True, "auto": True, "disabled": False}
"""What a `thinking` object says."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Of `reasoning_effort`, the least first."""


def switch_of(template: Mapping[str, Any], extra: Mapping[str, Any]) -> bool | None:
    """Return what a request says of thinking in its template's arguments and in fields that vLLM does not know."""
    found = [template.get(name) for name in SWITCHES] + [extra.get(SWITCHES[0])]
    if isinstance(config := extra.get("thinking"), Mapping):
        found.append(TYPES.get(str(config.get("type"))))
    return next((one for one in found if isinstance(one, bool)), None)


class Switched:
    """A request whose template gets the switch under both names; it takes the one that it knows."""

    def build_chat_params(self, *arguments: Any) -> Any:
        """See vLLM, which tells templates of the effort, and of `enable_thinking` where an effort is given."""
        request: Any = self
        params = super().build_chat_params(*arguments)  # type: ignore[misc]  # of the class beside it
        told = params.chat_template_kwargs
        given = request.chat_template_kwargs or {}
        if (switch := switch_of(given, request.model_extra or {})) is None:
            switch = told.get(SWITCHES[0])
        if switch is None:
            return params
        both = {name: given.get(name, switch) for name in SWITCHES}
        return dataclasses.replace(params, chat_template_kwargs=told | both)


_TAKEN: WeakKeyDictionary[Any, Sequence[str]] = WeakKeyDictionary()
"""Of each model's renderer, the efforts that it takes."""


async def taken_effort(serving: Any, effort: str | None) -> str | None:
    """Return the effort that the model takes in place of this one: clients have one default for all models.

    `serving`: a serving class of vLLM.  What none of its efforts resembles stays, to be refused.
    """
    if effort is None:
        return None
    if (taken := _TAKEN.get(serving.online_renderer)) is None:
        renders = AnthropicServingMessages._render_probe_prompt  # noqa: SLF001 - as vLLM finds what turns thinking off
        taken = [one for one in EFFORTS if await renders(serving, one) is not None]
        _TAKEN[serving.online_renderer] = taken
    return nearest_effort(effort, taken)


def nearest_effort(effort: str, taken: Sequence[str]) -> str:
    """Return the nearest of the efforts taken, of two the lower; thinking is never turned off by it."""
    if effort in taken or effort not in EFFORTS:
        return effort
    at = EFFORTS.index(effort)
    return min(
        (one for one in taken if one != EFFORTS[0]), key=lambda one: abs(EFFORTS.index(one) - at), default=effort
    )
