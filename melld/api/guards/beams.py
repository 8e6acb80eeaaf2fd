"""Refuses what vLLM's beam search would silently ignore.

Pure: a parsed request in, a `Refusal` (400, with `param`) or nothing out.
"""

from typing import Any

from pydantic import BaseModel

from melld.api.answers import bad

IGNORED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": (),
    "frequency_penalty": (0,),
    "logit_bias": (),
    "logprob_token_ids": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "response_format": (),
    "routed_experts_prompt_start": (0,),
    "seed": (),
    "spaces_between_special_tokens": (True,),
    "stop": ("",),
    "stop_token_ids": (),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "top_k": (0, -1),
    "top_p": (1,),
    "vllm_xargs": (),
}
"""Fields that beam search ignores, and the values besides none with which that makes no difference."""
_NONE: tuple[Any, ...] = (None, [], {})


def check_beams(request: BaseModel) -> None:
    """Refuse a beam search with fields that it ignores.

    Raises:
        Refusal: 400, with the field as `param`.
    """
    if not getattr(request, "use_beam_search", False):
        return
    for name, neutral in IGNORED.items():
        value = getattr(request, name, None)
        if value not in (*_NONE, *neutral) and not (name == "response_format" and _is_plain(value)):
            raise bad(name, f"beam search does not support {name}: remove it or use_beam_search")
    if getattr(request, "tool_choice", None) not in (None, "none", "auto"):
        raise bad("tool_choice", "beam search cannot be forced to call a tool: use tool_choice auto, or no beam search")
    if any(tool.function.strict for tool in getattr(request, "tools", None) or ()):
        raise bad("tools", "beam search does not support the schemas of strict tools")


def _is_plain(value: Any) -> bool:
    """Return True for an unconstrained text format, and for an audio format, which does not constrain tokens."""
    return isinstance(value, str) or getattr(value, "type", None) == "text"
