"""Events stamped from a mould equal those that vLLM would make, in every API, whatever comes between them."""

import json
import re
import time
from typing import Any

import pytest

from melld.engine.frontend.moulds import Mould, mould_of
from tests.api.http_client import CHAT, COMPLETIONS, connect, post
from tests.api.scripted import App

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": WEATHER}
USAGE = {"include_usage": True}
NAMES = "id|item_id|call_id|signature|created|created_at|completed_at"
BY_CHANCE = re.compile(rf'"(?:{NAMES})": ?(?:"[^"]*"|[\d.]+)|(?:chatcmpl-tool|call)[-_]\w+')
"""Ids and times."""


ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": ASKED, "max_tokens": 160}),
    "chat with usage": (CHAT, {"messages": ASKED, "max_tokens": 60, "stream_options": USAGE}),
    "chat with a tool": (CHAT, {"messages": ASKED, "max_tokens": 160, "tools": [TOOL]}),
    "chat that hides its thoughts": (CHAT, {"messages": ASKED, "max_tokens": 160, "include_reasoning": False}),
    "chat to a stop string": (
        CHAT,
        {"messages": ASKED, "max_tokens": 3000, "stop": ["ent", "zzz"], "stream_options": USAGE},
    ),
    "chat with its stop string": (
        CHAT,
        {"messages": ASKED, "max_tokens": 3000, "stop": ["ent"], "include_stop_str_in_output": True},
    ),
    "completion": (COMPLETIONS, {"prompt": "Hello", "max_tokens": 60, "stream_options": USAGE}),
    "completion with its prompt": (COMPLETIONS, {"prompt": "Hello", "max_tokens": 60, "echo": True}),
    "message": (MESSAGES, {"messages": ASKED, "max_tokens": 160}),
    "message with a tool": (
        MESSAGES,
        {"messages": ASKED, "max_tokens": 160, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
    ),
    "response": (RESPONSES, {"input": "Hello", "max_output_tokens": 160}),
    "response with a tool": (
        RESPONSES,
        {"input": "Hello", "max_output_tokens": 160, "tools": [{"type": "function"} | WEATHER]},
    ),
    "response with what it says of itself": (
        RESPONSES,
        {"input": "Hello", "max_output_tokens": 160, "enable_response_messages": True},
    ),
}
UNLIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "usage in each event": (
        CHAT,
        {"messages": ASKED, "max_tokens": 30, "stream_options": USAGE | {"continuous_usage_stats": True}},
    ),
    "two choices": (CHAT, {"messages": ASKED, "max_tokens": 30, "n": 2}),
    "token ids": (CHAT, {"messages": ASKED, "max_tokens": 30, "return_token_ids": True}),
    "two prompts": (COMPLETIONS, {"prompt": ["Hello", "there"], "max_tokens": 30}),
    "two tokens": (CHAT, {"messages": ASKED, "max_tokens": 2}),
}
NEEDS_PARSER = {"chat with a tool", "message with a tool"}


def both_ways(app: App, path: str, body: dict[str, Any]) -> tuple[str, str, int]:
    """Return a stream made by vLLM, the same one stamped, and the number of stamped events."""
    app.tell("whole")
    whole = BY_CHANCE.sub("", app.stream(path, body))
    app.tell("plain")
    return whole, BY_CHANCE.sub("", app.stream(path, body)), app.tell("plain")[0]


CASES = [
    (kind, model)
    for kind in ALIKE
    for model in ("plain", "raw", "tools", "reasoning", "agents")
    if model in ("tools", "agents")
    or kind not in NEEDS_PARSER | ({"response with a tool"} if model == "raw" else set())
]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "model"), CASES)
def test_a_stamped_stream_equals_vllm_s(app: App, kind: str, model: str, seed: int) -> None:
    """A client cannot tell which events were made for it and which were cut from the one before."""
    path, body = ALIKE[kind]
    whole, plain, written = both_ways(app, path, body | {"model": model, "seed": seed})
    assert whole.split("\n\n") == plain.split("\n\n")
    assert written > 5


@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": ASKED}), (COMPLETIONS, {"prompt": "Hello"})])
def test_a_stream_like_one_before_is_stamped_from_its_second_event(app: App, path: str, asked: dict[str, Any]) -> None:
    """vLLM makes those of the first token and the last, and the first without text: of a chat, with its role."""
    body = asked | {"model": "plain", "max_tokens": 20, "seed": 5}
    both_ways(app, path, body)
    whole, plain, written = both_ways(app, path, body)
    assert (whole, plain.count("choices") - written) == (plain, 3)


def test_a_prompt_that_is_echoed_is_told_once(app: App) -> None:
    """Digits before the first text look like those of ids."""
    path, body = ALIKE["completion with its prompt"]
    both_ways(app, path, body | {"model": "plain", "seed": 1, "echo": False})
    whole, plain, written = both_ways(app, path, body | {"model": "plain", "seed": 1, "prompt": "12"})
    assert whole == plain
    assert written > 5


@pytest.mark.parametrize("model", ["plain", "raw"])
@pytest.mark.parametrize("kind", UNLIKE)
def test_events_that_differ_in_more_than_text_are_made_by_vllm(app: App, kind: str, model: str) -> None:
    """Token counts and token names are right in each event."""
    path, body = UNLIKE[kind]
    whole, plain, written = both_ways(app, path, body | {"model": model, "seed": 1})
    assert (by_choice(whole), 0) == (by_choice(plain), written)


def by_choice(stream: str) -> list[str]:
    """Return the events grouped by choice: the order between choices is not guaranteed."""
    return sorted(stream.split("\n\n"), key=lambda event: re.findall(r'"index":(\d+)', event)[:1])


def test_a_client_that_pauses_reading_misses_nothing(app: App) -> None:
    """Its stream waits in the daemon, bounded, and resumes where it was."""
    body = {"model": "plain", "messages": ASKED, "max_tokens": 6000, "seed": 3, "stream_options": USAGE}
    app.tell("whole")
    whole = said_in(app.stream(CHAT, body))
    app.tell("plain")
    with connect(app.url, receive_bytes=4096) as connection:
        connection.sendall(post(body | {"stream": True}))
        written, running = app.tell("plain")
        while running or not written:
            time.sleep(0.02)  # another process: asking it is the only way to know
            more, running = app.tell("plain")
            written += more
        assert written < 5000
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert said_in(received.decode()) == whole
    assert '"completion_tokens":6000' in received.decode()


def said_in(stream: str) -> str:
    """Return the text of a chat's stream."""
    events = [json.loads(line) for line in re.findall(r"^data: (\{.*\})\r?$", stream, re.MULTILINE)]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": ASKED}), (RESPONSES, {"input": "Hello"})])
def test_a_stream_that_fails_midway_ends_in_an_error(app: App, path: str, asked: dict[str, Any]) -> None:
    """The error is the last event, numbered after the stamped ones."""
    app.tell("plain")
    body = asked | {"model": "plain", "max_tokens": 5000, "max_output_tokens": 5000, "seed": 1, "stream": True}
    with connect(app.url) as connection:
        connection.sendall(post(body, path))
        received = b""
        while received.count(b"data: ") < 40:
            received += connection.recv(65536)
        assert app.tell("break")[0] > 10
        received += b"".join(iter(lambda: connection.recv(65536), b""))
    app.tell("plain")
    events = [json.loads(line) for line in re.findall(r"^data: (\{.*\})\r?$", received.decode(), re.MULTILINE)]
    assert "broken for the test" in json.dumps(events[-1])
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_an_event_that_contains_its_text_twice_has_no_mould() -> None:
    """Text that equals a field name would be replaced in the wrong place."""
    assert mould_of('{"content":"content"}', "content", None) is None
    assert mould_of('{"content":"a"}', "b", None) is None
    mould = mould_of('{"delta":"a","sequence_number":7,"type":"t"}', "a", 7)
    assert mould is not None
    assert mould.cast('ä"\n', 8) == '{"delta":"ä\\"\\n","sequence_number":8,"type":"t"}'.encode()


def test_only_ids_and_times_of_a_known_mould_may_differ() -> None:
    """A new field could change from event to event."""
    known = Mould((b'{"id":"chat-9bd3","created":17,"text":"', b'"}'), None).common
    assert Mould((b'{"id":"chat-02ee","created":21,"text":"', b'"}'), None).common == known
    assert Mould((b'{"id":"chat-9bd3","created":17,"more":1,"text":"', b'"}'), None).common != known
    assert Mould((b'{"id":"chat-9bd3","created":17,"text":"', b'"'), b"}").common != known
