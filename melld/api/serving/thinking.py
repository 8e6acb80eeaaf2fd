"""Reads whether and how hard the model is to reason, in the terms of several services.

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
"""Whether each type of `thinking` object turns thinking on."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`, lowest first."""


def switch_of(template: Mapping[str, Any], extra: Mapping[str, Any]) -> bool | None:
    """Return what a request says about thinking in its template arguments and in fields that vLLM does not know."""
    found = [template.get(name) for name in SWITCHES] + [extra.get(SWITCHES[0])]
    if isinstance(config := extra.get("thinking"), Mapping):
        found.append(TYPES.get(str(config.get("type"))))
    return next((one for one in found if isinstance(one, bool)), None)


class Switched:
    """A request that passes the switch to its template under both names; the template reads the one it knows."""

    def build_chat_params(self, *arguments: Any) -> Any:
        """See vLLM, which passes the effort to templates, and `enable_thinking` if an effort is given."""
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
"""The efforts that each model accepts, by its renderer."""


async def taken_effort(serving: Any, effort: str | None) -> str | None:
    """Return the effort to use for this one: clients have a single default for all models.

    `serving`: a serving class of vLLM.  An unknown effort is returned as it is, to be refused.
    """
    if effort is None:
        return None
    if (taken := _TAKEN.get(serving.online_renderer)) is None:
        renders = AnthropicServingMessages._render_probe_prompt  # noqa: SLF001 - as vLLM finds what turns thinking off
        taken = [one for one in EFFORTS if await renders(serving, one) is not None]
        _TAKEN[serving.online_renderer] = taken
    return nearest_effort(effort, taken)


def nearest_effort(effort: str, taken: Sequence[str]) -> str:
    """Return the nearest accepted effort, the lower of two; it never turns thinking off."""
    if effort in taken or effort not in EFFORTS:
        return effort
    at = EFFORTS.index(effort)
    return min(
        (one for one in taken if one != EFFORTS[0]), key=lambda one: abs(EFFORTS.index(one) - at), default=effort
    )
