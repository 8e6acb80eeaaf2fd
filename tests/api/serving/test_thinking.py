"""Thinking can be switched in every service's terms, and thoughts are sent and accepted under every name."""

from typing import Any

import openai
import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

from melld.api.serving.messages import Messages
from melld.api.serving.requests import ChatCompletionRequest, ResponsesRequest
from melld.api.serving.thinking import EFFORTS, nearest_effort
from tests.api.http_client import CHAT, request
from tests.api.scripted import App

ASKED: list[Any] = [{"role": "user", "content": "Hello"}]
WAYS: list[tuple[dict[str, Any], bool | None]] = [
    ({}, None),
    ({"reasoning_effort": "none"}, False),
    ({"reasoning_effort": "low"}, True),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, False),
    ({"thinking": {"type": "disabled"}}, False),
    ({"thinking": {"type": "enabled"}}, True),
    ({"enable_thinking": False}, False),
    ({"thinking": {"type": "unknown"}}, None),
    ({"thinking": "much", "enable_thinking": "yes"}, None),
]


def switches(asked: Any) -> tuple[Any, Any]:
    """Return what a template gets under the two names."""
    told = asked.build_chat_params(None, "auto").chat_template_kwargs
    return told.get("enable_thinking"), told.get("thinking")


@pytest.mark.parametrize(("fields", "want"), WAYS)
def test_a_template_gets_the_switch_under_the_name_it_knows(fields: dict[str, Any], want: bool | None) -> None:
    """Whoever turns thinking off need not know whether the model is a Qwen, a DeepSeek or a Granite."""
    assert switches(ChatCompletionRequest(messages=ASKED, **fields)) == (want, want)
    of_responses = {name: value for name, value in fields.items() if name != "reasoning_effort"}
    if effort := fields.get("reasoning_effort"):
        of_responses["reasoning"] = {"effort": effort}
    assert switches(ResponsesRequest(input="Hello", **of_responses)) == (want, want)


def test_conflicting_switches_are_left_alone() -> None:
    """A client that sets both means what it says."""
    given = {"enable_thinking": True, "thinking": False}
    assert switches(ChatCompletionRequest(messages=ASKED, chat_template_kwargs=given)) == (True, False)


@pytest.mark.parametrize(
    ("thinking", "want"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_anthropic_s_thinking_field_enables_thinking(thinking: dict[str, Any] | None, want: bool | None) -> None:
    """Models that think only on request do so, and templates without the switch get no argument."""
    asked = AnthropicMessagesRequest(model="m", max_tokens=2000, messages=ASKED, thinking=thinking)
    chat = Messages.to_chat_completion_request(asked)
    assert switches(chat) == (want, want)
    assert chat.chat_template_kwargs is None
    assert chat.thinking_token_budget == (thinking or {}).get("budget_tokens")


@pytest.mark.parametrize(
    ("effort", "taken", "want"),
    [
        ("medium", EFFORTS, "medium"),
        ("none", ("low", "medium", "high"), "low"),
        ("minimal", ("none", "low", "medium", "high"), "low"),
        ("xhigh", ("low", "medium", "high"), "high"),
        ("medium", ("none", "high"), "high"),
        ("medium", ("low", "high"), "low"),
        ("low", ("none",), "low"),
        ("low", (), "low"),
    ],
)
def test_an_effort_maps_to_the_nearest_that_the_model_knows(effort: str, taken: tuple[str, ...], want: str) -> None:
    """Clients have one default for all models; it does not turn thinking off."""
    assert nearest_effort(effort, taken) == want


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, "thinking= effort="),
        ({"reasoning_effort": "medium"}, "thinking=True effort=low"),
        ({"reasoning_effort": "max"}, "thinking=True effort=max"),
        ({"reasoning_effort": "none", "thinking": {"type": "disabled"}}, "thinking=False effort=low"),
    ],
)
def test_a_client_s_settings_reach_the_template(app: App, fields: dict[str, Any], want: str) -> None:
    """An effort that the template rejects is no error."""
    asked = {"model": "switched", "messages": ASKED, "max_tokens": 2, "return_prompt_text": True} | fields
    answer = request(app.url, "POST", CHAT, asked)
    assert answer.status == 200, answer.body
    assert answer.json()["prompt_text"].split(";")[0] == want


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_thought_is_accepted_under_either_name(app: App, name: str) -> None:
    """A model that thinks between its calls sees its earlier thoughts."""
    said = {"role": "assistant", "content": "Yes.", name: "Sure?"}
    asked = {"model": "switched", "messages": [*ASKED, said, *ASKED], "max_tokens": 2, "return_prompt_text": True}
    answer = request(app.url, "POST", CHAT, asked)
    assert "assistant(Sure?): Yes." in answer.json()["prompt_text"], answer.body


def test_a_chat_returns_thoughts_under_both_names(app: App) -> None:
    """Half of the clients read one, half the other."""
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    asked: dict[str, Any] = {"model": "agents", "messages": ASKED, "max_tokens": 160, "seed": 1, "tools": tools}
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        message: Any = client.chat.completions.create(**asked).choices[0].message
        chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    assert message.reasoning
    assert message.reasoning_content == message.reasoning
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == message.reasoning
    calls = [*message.tool_calls, *(call for delta in deltas for call in delta.tool_calls or () if call.id)]
    assert [call.id[:5] for call in calls] == ["call_", "call_"]


@pytest.mark.parametrize("model", ["plain", "switched"])
def test_a_thinking_budget_is_no_error_for_a_model_without_thinking(app: App, model: str) -> None:
    """Agents ask every model to think."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = {"model": model, "messages": ASKED, "max_tokens": 2000, "thinking": thinking}
    assert request(app.url, "POST", "/v1/messages", asked).status == 200
