"""Limits the work that one call may ask for.

Pure: a parsed request (one of vLLM's pydantic models) in, a `Refusal` (400, with `param`) or nothing out.  Limits are
compared with parsed values, because pydantic accepts several forms of one number (`200`, `200.0`, `"200"`, `true`).
"""

from typing import Any

from pydantic import BaseModel

from melld.api.answers import bad
from melld.api.guards.beams import check_beams
from melld.api.parsing import TEXTS
from melld.config_server import ServerConfig

# Beyond these a score is no longer a number, and the worker or the beam search fails.
_RANGES = {"repetition_penalty": (0.01, 100.0), "length_penalty": (-20.0, 20.0)}
# vLLM goes through these for each prompt of a call, on the event loop: at most about 30 ms together.
_FOR_EACH_PROMPT = {"logit_bias": 30_000, "stop_token_ids": 500_000, "allowed_token_ids": 500_000}
# Each of a call's requests is kept with its own copy: 256 copies of a large body would take gigabytes.
_MOST_CHARACTERS = {"bad_words": 20_000, "stop": 100_000, "stop_sequences": 100_000, "vllm_xargs": 100_000}
MAX_CHARACTERS_IN_STRINGS = 100_000
"""Limit of a text whose tokens are returned as strings."""


def check_work(request: BaseModel, limits: ServerConfig) -> None:
    """Reject a request that exceeds the limits for one call.

    Raises:
        Refusal: 400, with the field as `param`.
    """
    _check_choices(request, limits)
    check_beams(request)
    for name, (least, most) in _RANGES.items():
        value = _field(request, name)
        if value is not None and not least <= value <= most:
            raise bad(name, f"{name} must be from {least:g} to {most:g}")
    for name in ("stop", "stop_sequences", "bad_words"):
        words = _field(request, name)
        if isinstance(words, list) and len(words) > limits.max_stop_strings:
            raise bad(name, f"{name} may hold at most {limits.max_stop_strings} strings")
    for name, most in _MOST_CHARACTERS.items():
        if _count_characters(_field(request, name)) > most:
            raise bad(name, f"{name} may hold at most {most} characters")
    text = _field(request, "prompt")
    if _field(request, "return_token_strs") and isinstance(text, str) and len(text) > MAX_CHARACTERS_IN_STRINGS:
        raise bad("return_token_strs", f"return_token_strs is limited to {MAX_CHARACTERS_IN_STRINGS} characters")


def _check_choices(request: BaseModel, limits: ServerConfig) -> None:
    choices = _field(request, "n") or 1
    if choices > limits.max_choices:
        raise bad("n", f"n must be at most {limits.max_choices}")
    texts = {name: _count_prompts(_field(request, name)) for name in ("input", *TEXTS)}
    counts = {name: _count_prompts(_field(request, name)) for name in ("prompt", "prompt_embeds")}
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
        if len(_field(request, name) or ()) * prompts > most:
            raise bad(name, f"{name} has at most {most} entries in one call, counted for each of its prompts")


def _count_prompts(value: Any) -> int:
    """Count a list of strings, of lists or of embeddings as many prompts; a list of tokens or of messages is one."""
    if isinstance(value, list) and value and isinstance(value[0], str | bytes | list):
        return len(value)
    return int(value is not None)


def _count_characters(value: Any) -> int:
    """Count the characters of all texts inside."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_characters, (*value, *value.values())))
    return sum(map(_count_characters, value)) if isinstance(value, list) else 0


def _field(request: BaseModel, name: str) -> Any:
    """Return a field that the model has, or None.  Unknown fields have no effect and may contain anything."""
    return vars(request).get(name)
