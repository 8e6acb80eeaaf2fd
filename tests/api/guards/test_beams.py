"""Beam search: every accepted field takes effect, and all others are refused."""

import ast
import inspect
import textwrap
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

from melld.api.answers import Refusal
from melld.api.guards.work import HONOURED, IGNORED, check_beams

MODELS = (ChatCompletionRequest, CompletionRequest, TranscriptionRequest, TranslationRequest)
ELSEWHERE = {
    "echo",
    "logprobs",
    "max_tokens",
    "stream",
    "stream_interval",
    "top_logprobs",
    "kv_transfer_params",
    "ec_transfer_params",
}
"""What vLLM reads for sampling, but its serving classes carry out for beams too, or other guards refuse."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
NAMED = {"type": "function", "function": {"name": "look"}}


def read_by(model: Any, method: str) -> set[str]:
    """Return the fields that a method of vLLM's model reads, directly or through methods it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(model, method))))
    owned = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute)]
    names = {one.attr for one in owned if isinstance(one.value, ast.Name) and one.value.id == "self"}
    called = [read_by(model, name) for name in names if callable(getattr(model, name, None))]
    return (names & model.model_fields.keys()).union(*called)


@pytest.mark.parametrize("model", MODELS)
def test_beam_search_refuses_every_sampling_only_field(model: Any) -> None:
    """A field added by a newer vLLM is reviewed before users meet it."""
    sampling, beams = read_by(model, "to_sampling_params"), read_by(model, "to_beam_search_params")
    defaults = getattr(model, "_DEFAULT_SAMPLING_PARAMS", {})
    sampling |= set(getattr(defaults, "default", defaults))
    assert beams
    assert sampling - beams - ELSEWHERE <= IGNORED
    assert not IGNORED & beams
    assert beams & sampling <= HONOURED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [5]),
        ("bad_words", ["a"]),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("min_p", 0.1),
        ("min_tokens", 2),
        ("presence_penalty", -1),
        ("prompt_logprobs", 0),
        ("repetition_penalty", 1.1),
        ("response_format", {"type": "json_object"}),
        ("seed", 0),
        ("spaces_between_special_tokens", False),
        ("stop", "x"),
        ("stop_token_ids", [5]),
        ("structured_outputs", {"choice": ["a"]}),
        ("thinking_token_budget", 0),
        ("top_k", 5),
        ("top_p", 0.5),
        ("vllm_xargs", {"a": 1}),
    ],
)
def test_fields_that_beam_search_ignores_are_refused_by_name(name: str, value: Any) -> None:
    """A client learns that its stop strings, limits or formats would do nothing."""
    both: dict[str, Any] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "use_beam_search": True}
    for model in (CompletionRequest, ChatCompletionRequest):
        with pytest.raises(Refusal) as refused:
            check_beams(model.model_validate(both | {name: value}))
        assert (refused.value.answer.status, refused.value.answer.param) == (400, name)
        check_beams(model.model_validate(both | {name: value, "use_beam_search": False}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [TOOL | {"function": TOOL["function"] | {"strict": True}}]}, "tools"),  # type: ignore[operator]
        ({"tools": [TOOL]}, None),
        (
            {
                "frequency_penalty": 0,
                "repetition_penalty": 1.0,
                "top_p": 1,
                "top_k": -1,
                "min_p": 0,
                "stop": [],
                "logit_bias": {},
                "response_format": {"type": "text"},
                "spaces_between_special_tokens": True,
            },
            None,
        ),
        ({"n": 3, "length_penalty": 2, "ignore_eos": True, "logprobs": True, "temperature": 0.5}, None),
    ],
)
def test_fields_that_work_or_make_no_difference_are_accepted(fields: dict[str, Any], param: str | None) -> None:
    """Clients send default values, and tools that the model may call or not."""
    body = {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True}
    request = ChatCompletionRequest.model_validate(body | fields)
    if param is None:
        check_beams(request)
        return
    with pytest.raises(Refusal) as refused:
        check_beams(request)
    assert refused.value.answer.param == param
