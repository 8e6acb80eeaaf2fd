"""Truncated responses say so, in every form."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.api.http_client import MODEL, request
from tests.serve.daemon_process import DaemonProcess

LOOK = {
    "type": "function",
    "name": "look",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"where": {"type": "string", "minLength": 200, "maxLength": 300}},
        "required": ["where"],
        "additionalProperties": False,
    },
}
CALL = {"tools": [LOOK], "tool_choice": "required"}
WORDS: dict[str, Any] = {}


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def checked(answer: Any, kind: str) -> None:
    """Check that the response and its last item are marked incomplete."""
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.output[-1].type, answer.output[-1].status) == (kind, "incomplete")
    if kind == "function_call":
        with pytest.raises(json.JSONDecodeError):
            json.loads(answer.output[-1].arguments)


@pytest.mark.parametrize(("asked", "kind"), [(CALL, "function_call"), (WORDS, "message")], ids=["call", "message"])
@pytest.mark.parametrize("background", [False, True], ids=["waited-for", "background"])
def test_a_truncated_stream_ends_as_incomplete(
    client: openai.OpenAI, asked: dict[str, Any], kind: str, background: bool
) -> None:
    """An agent must not run a tool with half of its arguments."""
    streamed = list(
        client.responses.create(
            model=MODEL, input="Hello", max_output_tokens=40, stream=True, background=background, **asked
        )
    )
    last = streamed[-1]
    assert last.type == "response.incomplete"
    checked(last.response, kind)
    done = [one.item for one in streamed if one.type == "response.output_item.done"]
    assert [item.status for item in done] == ["completed"] * (len(done) - 1) + ["incomplete"]
    assert [one.sequence_number for one in streamed] == list(range(len(streamed)))
    kept = client.responses.retrieve(last.response.id)
    checked(kept, kind)
    assert kept.output == last.response.output


@pytest.mark.parametrize(("asked", "kind"), [(WORDS, "message")], ids=["message"])
@pytest.mark.parametrize("background", [False, True], ids=["waited-for", "background"])
def test_a_truncated_answer_is_incomplete(
    client: openai.OpenAI, asked: dict[str, Any], kind: str, background: bool
) -> None:
    """However it is awaited, and when it is fetched again."""
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, background=background, **asked)
    while answer.status in ("queued", "in_progress"):
        answer = client.responses.retrieve(answer.id)
    checked(answer, kind)
    checked(client.responses.retrieve(answer.id), kind)


def test_an_answer_that_ends_by_itself_is_complete(client: openai.OpenAI) -> None:
    """Streamed or not."""
    asked: dict[str, Any] = {"extra_body": {"structured_outputs": {"choice": ["yes"]}}}
    whole = client.responses.create(model=MODEL, input="Hello", max_output_tokens=9, **asked)
    assert (whole.status, whole.output[-1].status) == ("completed", "completed")  # type: ignore[union-attr]
    *_, last = client.responses.create(model=MODEL, input="Hello", max_output_tokens=9, stream=True, **asked)
    assert last.type == "response.completed"
    assert [item.status for item in last.response.output] == ["completed"]  # type: ignore[union-attr]


def test_a_truncated_answer_can_be_continued(client: openai.OpenAI) -> None:
    """A client that sees the truncation asks for the rest."""
    first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    again = client.responses.create(
        model=MODEL, input="Go on", max_output_tokens=8, previous_response_id=first.id, stream=True
    )
    assert list(again)[-1].type == "response.incomplete"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_tool_choice_that_would_be_ignored_is_refused(daemon: DaemonProcess, mode: str) -> None:
    """Free text would come in place of a call."""
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "look"}]}
    answer = request(daemon.url, "POST", "/v1/responses", {"input": "x", "tools": [LOOK], "tool_choice": allowed})
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"] == "tool_choice"
