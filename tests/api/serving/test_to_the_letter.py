"""Whole streams match the official clients' models, and conversations continue with everything that was said."""

import re
from types import ModuleType
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.http_client import request
from tests.api.scripted import App

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
MESSAGE: dict[str, Any] = {
    "model": "agents",
    "messages": ASKED,
    "max_tokens": 160,
    "seed": 1,
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
}
RESPONSE: dict[str, Any] = {
    "model": "agents",
    "input": "Hello",
    "max_output_tokens": 160,
    "seed": 1,
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
}
KEPT = {"store": False, "include": ["reasoning.encrypted_content"]}


@pytest.fixture(scope="module")
def anthropic() -> ModuleType:
    """Anthropic's client, whose import takes a second, of which the collection of the tests has no need."""
    import anthropic

    return anthropic


def told(app: App, path: str, body: dict[str, Any]) -> list[str]:
    """Return the JSON of a stream's events; each is below its type."""
    pairs = re.findall(r"^event: (\S+)\ndata: (.*)$", app.stream(path, body), re.MULTILINE)
    assert all(re.search(rf'"type": ?"{re.escape(kind)}"', data) for kind, data in pairs)
    return [data for _, data in pairs]


def ask(app: App, path: str, body: dict[str, Any]) -> bytes:
    """Return a whole answer."""
    answer = request(app.url, "POST", path, body, {"anthropic-version": "1999-01-01", "anthropic-beta": "unknown"})
    assert answer.status == 200, answer.body
    return answer.body


# -- Anthropic's messages ----------------------------------------------------------------------------------------------


def test_a_messages_stream_follows_anthropic_s_order(app: App, anthropic: ModuleType) -> None:
    """Thoughts end with a signature, blocks with a stop; ids and counts are where clients look for them."""
    adapter: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    events: list[Any] = [adapter.validate_json(one, strict=True) for one in told(app, MESSAGES, MESSAGE)]
    kinds = [getattr(getattr(one, "delta", None), "type", None) or one.type for one in events]
    shown = [kind for at, kind in enumerate(kinds) if kind != (kinds[at - 1] if at else None)]
    block = ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"]
    others = [["content_block_start", one, "content_block_stop"] for one in ("text_delta", "input_json_delta")]
    assert shown == ["message_start", *block, *others[0], *others[1], "message_delta", "message_stop"]
    starts = [one.content_block for one in events if one.type == "content_block_start"]
    assert [one.index for one in events if one.type == "content_block_start"] == [0, 1, 2]
    assert events[0].message.id.startswith("msg_")
    assert starts[2].id.startswith("toolu_")
    assert (events[-2].delta.stop_reason, events[-2].delta.stop_sequence) == ("max_tokens", None)
    for usage in (events[0].message.usage, events[-2].usage):
        assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)
        assert usage.input_tokens > 0
    assert events[-2].usage.output_tokens == 160


def test_a_whole_message_matches_anthropic_s_format(app: App, anthropic: ModuleType) -> None:
    """Its thought is signed, so that a client may send it back."""
    message = anthropic.types.Message.model_validate_json(ask(app, MESSAGES, MESSAGE), strict=True)
    assert message.id.startswith("msg_")
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].signature
    assert message.content[2].id.startswith("toolu_")
    assert (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens) == (0, 0)


def test_a_message_without_tools_calls_none(app: App, anthropic: ModuleType) -> None:
    """What looks like a call is text, as in a chat: the client has no tool that it could run."""
    message = anthropic.types.Message.model_validate_json(ask(app, MESSAGES, MESSAGE | {"tools": []}), strict=True)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert "<tool_call>" in message.content[1].text


def test_a_conversation_with_all_kinds_of_blocks_goes_on(app: App, anthropic: ModuleType) -> None:
    """What an agent sends in its second turn, with what Anthropic's service alone understands."""
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    result = [{"type": "text", "text": "Rain"} | cached]
    thoughts = [{"type": "redacted_thinking", "data": "abc"}, {"type": "thinking", "thinking": "Hm", "signature": "s"}]
    turns = [
        {"role": "assistant", "content": [*thoughts, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": result}]},
    ]
    body = MESSAGE | {"system": [{"type": "text", "text": "Be brief."} | cached], "messages": ASKED + turns}
    body |= {"metadata": {"user_id": "u"}, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    message = anthropic.types.Message.model_validate_json(ask(app, MESSAGES, body))
    counted = {name: body[name] for name in ("model", "messages", "system", "tools", "tool_choice")}
    with anthropic.Anthropic(base_url=app.url, api_key="none", max_retries=0) as client:
        assert client.messages.count_tokens(**counted).input_tokens == message.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError) as refused:
            client.messages.create(model="other", messages=ASKED, max_tokens=1)
    assert refused.value.request_id
    assert refused.value.body["error"]["type"] == "not_found_error"


# -- OpenAI's responses ------------------------------------------------------------------------------------------------


def test_a_responses_stream_follows_openai_s_order(app: App) -> None:
    """Each item is added, filled and finished under one id, and the last event repeats all of it."""
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    events: list[Any] = [adapter.validate_json(one) for one in told(app, RESPONSES, RESPONSE | KEPT)]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    added = [one.item for one in events if one.type == "response.output_item.added"]
    done = [one.item for one in events if one.type == "response.output_item.done"]
    assert [one.type for one in added] == ["reasoning", "message", "function_call"]
    assert [one.id for one in added] == [one.id for one in done] == [one.id for one in events[-1].response.output]
    assert [one.id.split("_")[0] for one in done] == ["rs", "msg", "fc"]
    assert done[2].call_id.startswith("call_")
    assert done[0].encrypted_content == events[-1].response.output[0].encrypted_content
    thought = "".join(one.delta for one in events if one.type == "response.reasoning_text.delta")
    assert [one.text for one in done[0].content] == [thought]
    assert events[-1].response.usage.input_tokens_details.cached_tokens == 0


def prompt_of(app: App, body: dict[str, Any]) -> str:
    """Return the prompt that a request makes."""
    asked = RESPONSE | {"enable_response_messages": True, "max_output_tokens": 2} | body
    answer = Response.model_validate_json(ask(app, RESPONSES, asked))
    return str(answer.input_messages[0]["message"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", ["agents", "switched"])
def test_a_response_continues_from_the_whole_previous_one(app: App, model: str) -> None:
    """Calls and thoughts too, whether the server or the client keeps them; else results would answer nothing."""
    of = {"model": model, "tools": RESPONSE["tools"] if model == "agents" else []}
    first = Response.model_validate_json(ask(app, RESPONSES, RESPONSE | of | {"include": KEPT["include"]}))
    result = {"type": "function_call_output", "call_id": first.output[-1].to_dict().get("call_id", "call_1")}
    results = [result | {"output": [{"type": "input_text", "text": "Rain"}]}]
    by_server = prompt_of(app, of | {"previous_response_id": first.id, "input": results})
    items = [one.to_dict(exclude_none=True) for one in first.output]
    assert items[0].pop("content")
    by_client = prompt_of(app, of | {"input": [*ASKED, *items, *results]})
    assert by_server == by_client
    assert ("<tool_call>" if model == "agents" else first.output[0].content[0].text) in by_server  # type: ignore


def test_a_prompt_has_one_begin_token(app: App) -> None:
    """As in a chat: models answer worse with two."""
    chat = {"model": "plain", "messages": ASKED, "max_tokens": 1}
    used = request(app.url, "POST", "/v1/chat/completions", chat).json()["usage"]["prompt_tokens"]
    answer = ask(app, RESPONSES, {"model": "plain", "input": "Hello", "max_output_tokens": 1})
    usage = Response.model_validate_json(answer).usage
    assert usage is not None
    assert usage.input_tokens == used


@pytest.mark.parametrize("kept", ["gAAAAA", "melld1:!", "melld1:gA=="])
def test_an_unreadable_thought_is_dropped(app: App, kept: str) -> None:
    """A conversation may have begun on another server."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": kept}
    assert prompt_of(app, {"input": [thought, *ASKED]}) == prompt_of(app, {"input": ASKED})


def test_every_part_of_an_earlier_answer_is_read(app: App) -> None:
    """vLLM reads only the first of several, and fails on a refusal."""
    parts: list[dict[str, Any]] = [{"type": "output_text", "text": text, "annotations": []} for text in ("One", " two")]
    parts.append({"type": "refusal", "refusal": " no"})
    item = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": parts}
    one = {"role": "assistant", "content": "One two no"}
    assert prompt_of(app, {"input": [item, *ASKED]}) == prompt_of(app, {"input": [one, *ASKED]})
    assert "One two no" in prompt_of(app, {"input": [{"role": "assistant", "content": parts}, *ASKED]})


def test_errors_have_each_api_s_own_shape(app: App) -> None:
    """Clients turn them into the exception that a program expects."""
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="agents", input=[{"type": "item_reference", "id": "msg_1"}])
        assert refused.value.param == "input"
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="agents", input="x", previous_response_id="resp_none")
