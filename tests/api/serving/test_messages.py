"""Anthropic's messages: a final assistant message is continued."""

import json
from typing import Any

import pytest

from tests.api.http_client import CHAT, MODEL, request
from tests.serve.daemon_process import DaemonProcess

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
QUESTION = {"role": "user", "content": "What is your name?"}
BEGUN = "My name is"


def asked(content: Any, **fields: Any) -> dict[str, Any]:
    """Return a question and the beginning of its answer."""
    messages = [QUESTION, {"role": "assistant", "content": content}]
    return {"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": messages} | fields


def text_of(daemon: DaemonProcess, body: dict[str, Any]) -> str:
    """Return the text of an answer, whole or streamed."""
    answer = request(daemon.url, "POST", MESSAGES, body)
    assert answer.status == 200, answer.body
    if not body.get("stream"):
        return str(answer.json()["content"][0]["text"])
    lines = (line.removeprefix(b"data: ") for line in answer.body.splitlines() if line.startswith(b"data: "))
    return "".join(one["delta"].get("text", "") for one in map(json.loads, lines) if "delta" in one)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "content",
    [BEGUN, [{"type": "text", "text": BEGUN}], [{"type": "text", "text": "My "}, {"type": "text", "text": "name is"}]],
    ids=["text", "block", "blocks"],
)
def test_an_answer_continues_the_assistant_s_last_message(daemon: DaemonProcess, content: Any, stream: bool) -> None:
    """Programs prefill the model's answer and get what follows."""
    chat = {"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": asked(BEGUN)["messages"]}
    goes_on = chat | {"continue_final_message": True, "add_generation_prompt": False}
    want, other = (
        request(daemon.url, "POST", CHAT, body).json()["choices"][0]["message"]["content"] for body in (goes_on, chat)
    )
    assert want != other
    assert text_of(daemon, asked(content, stream=stream)) == want


def test_a_prefilled_message_is_counted_as_it_is_used(daemon: DaemonProcess) -> None:
    """No new turn starts after it."""
    counted = request(daemon.url, "POST", COUNT, {"model": MODEL, "messages": asked(BEGUN)["messages"]})
    used = request(daemon.url, "POST", MESSAGES, asked(BEGUN))
    assert counted.json()["input_tokens"] == used.json()["usage"]["input_tokens"]


def test_an_empty_last_message_begins_the_answer(daemon: DaemonProcess) -> None:
    """Nothing has been said yet."""
    begun = asked("")
    assert text_of(daemon, begun) == text_of(daemon, begun | {"messages": [QUESTION]})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (BEGUN + " ", "trailing whitespace"),
        ([{"type": "text", "text": BEGUN + "\n"}], "trailing whitespace"),
        ([{"type": "tool_use", "id": "a", "name": "look", "input": {}}], "tool_result"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(daemon: DaemonProcess, content: Any, why: str) -> None:
    """As Anthropic's API refuses it."""
    for path in (MESSAGES, COUNT):
        answer = request(daemon.url, "POST", path, asked(content))
        assert answer.status == 400, answer.body
        assert why in answer.json()["error"]["message"]
