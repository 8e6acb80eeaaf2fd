"""Limits the work that one call may ask for.

Refuses, too, what beam search would ignore without a word.

Pure: a parsed request (one of vLLM's pydantic models) in, a `Refusal` (400, with `param`) or nothing out.  Limits are
compared with parsed values, because pydantic accepts several forms of one number (`200`, `200.0`, `"200"`, `true`).
"""

from typing import Any

from pydantic import BaseModel
from vllm.sampling_params import SamplingParams

from melld.api.answers import bad
from melld.api.parsing import TEXTS
from melld.config_server import ServerConfig

# Beyond these a score is no longer a number, and the worker or the beam search fails.
_RANGES = {"repetition_penalty": (0.01, 100.0), "length_penalty": (-20.0, 20.0)}
# vLLM goes through these for each prompt of a call, on the event loop: at most about 30 ms together.
_FOR_EACH_PROMPT = {"logit_bias": 30_000, "stop_token_ids": 500_000, "allowed_token_ids": 500_000}
# Each of a call's requests is kept with its own copy: 256 copies of a large body would take gigabytes.
_MOST_CHARACTERS = {"bad_words": 20_000, "stop": 100_000, "stop_sequences": 100_000, "vllm_xargs": 100_000}
_TEXTS, _PROMPTS = ("input", *TEXTS), ("prompt", "prompt_embeds")
MAX_CHARACTERS_IN_STRINGS = 100_000
"""Limit of a text whose tokens are returned as strings."""


def check_work(request: BaseModel, limits: ServerConfig) -> None:
    """Reject a request that exceeds the limits for one call.

    Raises:
        Refusal: 400, with the field as `param`.
    """
    fields = {name: value for name, value in vars(request).items() if value is not None}  # those that the model has
    _check_choices(fields, limits)
    check_beams(request)
    for name, (least, most) in _RANGES.items():
        if name in fields and not least <= fields[name] <= most:
            raise bad(name, f"{name} must be from {least:g} to {most:g}")
    for name in ("stop", "stop_sequences", "bad_words"):
        words = fields.get(name)
        if isinstance(words, list) and len(words) > limits.max_stop_strings:
            raise bad(name, f"{name} may hold at most {limits.max_stop_strings} strings")
    for name, most in _MOST_CHARACTERS.items():
        if name in fields and _count_characters(fields[name]) > most:
            raise bad(name, f"{name} may hold at most {most} characters")
    text = fields.get("prompt")
    if fields.get("return_token_strs") and isinstance(text, str) and len(text) > MAX_CHARACTERS_IN_STRINGS:
        raise bad("return_token_strs", f"return_token_strs is limited to {MAX_CHARACTERS_IN_STRINGS} characters")


def _check_choices(fields: dict[str, Any], limits: ServerConfig) -> None:
    choices = fields.get("n") or 1
    if choices > limits.max_choices:
        raise bad("n", f"n must be at most {limits.max_choices}")
    texts, counts = (
        {name: _count_prompts(fields[name]) for name in names if name in fields} for names in (_TEXTS, _PROMPTS)
    )
    for counted, most, noun in (
        (texts, limits.max_texts_per_call, "texts"),
        (counts, limits.max_prompts_per_call, "prompts"),
    ):
        if (count := sum(counted.values())) > most:
            name = max(counted, key=counted.__getitem__)
            raise bad(name, f"one call takes at most {most} {noun}, not {count}")
    prompts = max(1, sum(counts.values()))
    if prompts * choices > max(limits.max_prompts_per_call, limits.max_choices):
        raise bad("n", f"{prompts} prompts with n = {choices} are too many for one call")
    for name, most in _FOR_EACH_PROMPT.items():
        if name in fields and len(fields[name]) * prompts > most:
            raise bad(name, f"{name} has at most {most} entries in one call, counted for each of its prompts")


def _count_prompts(value: Any) -> int:
    """Count a list of strings, of lists or of embeddings as many prompts; a list of tokens or of messages is one."""
    if isinstance(value, list) and value and isinstance(value[0], str | bytes | list):
        return len(value)
    return 1


def _count_characters(value: Any) -> int:
    """Count the characters of all texts inside."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_characters, (*value, *value.values())))
    return sum(map(_count_characters, value)) if isinstance(value, list) else 0


HONOURED = frozenset(
    {"n", "max_tokens", "temperature", "logprobs", "stream_interval", "ignore_eos", "watermarking"}
    | {"skip_special_tokens", "include_stop_str_in_output"}
)
"""Of the fields for sampling, those that beam search takes too."""
IGNORED = {*SamplingParams.__struct_fields__, "response_format", "vllm_xargs"} - HONOURED
_UNLIMITED = ("thinking_token_budget", "top_k")
"""Those for which -1 stands for no limit."""
_DEFAULTS = SamplingParams()


def check_beams(request: BaseModel) -> None:
    """Refuse a beam search with fields that it ignores.

    Raises:
        Refusal: 400, with the field as `param`.
    """
    if not getattr(request, "use_beam_search", False):
        return
    for name in sorted(IGNORED & type(request).model_fields.keys()):
        if not _changes_nothing(name, getattr(request, name)):
            raise bad(name, f"beam search does not support {name}: remove it or use_beam_search")
    if getattr(request, "tool_choice", None) not in (None, "none", "auto"):
        raise bad("tool_choice", "beam search cannot be forced to call a tool: use tool_choice auto, or no beam search")
    if any(tool.function.strict for tool in getattr(request, "tools", None) or ()):
        raise bad("tools", "beam search does not support the schemas of strict tools")


def _changes_nothing(name: str, value: Any) -> bool:
    """Return True for a value with which it makes no difference that the field is ignored."""
    if name == "response_format":  # a text's without constraints, and an audio's, which is no matter of its tokens
        return value is None or isinstance(value, str) or value.type == "text"
    if value in (None, [], {}, "") or value == getattr(_DEFAULTS, name, None):
        return True
    return name in _UNLIMITED and bool(value == -1)
