"""A daemon with a reasoning parser but no tool parser: constraints hold or are refused."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.http_client import CHAT, COMPLETIONS, MODEL, chat, completion, request
from tests.serve.daemon_process import DaemonProcess

SCHEMA = {"enum": ["yes", "no"]}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def told(body: bytes) -> list[Any]:
    """Return the events of a stream."""
    lines = (line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {"))
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def reasoning(demo_model: Path) -> Iterator[DaemonProcess]:
    """One worker with vLLM's Qwen 3 reasoning parser."""
    options = ("--set", 'model.vllm.reasoning_parser="qwen3"', "--set", 'model.vllm.tool_call_parser="none"')
    with DaemonProcess(demo_model, "--device", "cpu:1", *options) as process:
        yield process.wait_ready()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "constraint",
    [
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ],
    ids=lambda value: next(iter(value.get("structured_outputs", value))),
)
def test_a_completion_keeps_to_its_constraint(reasoning: DaemonProcess, constraint: Any, stream: bool) -> None:
    """A plain completion has no reasoning phase: unconstrained text with a 200 would break its parser."""
    asked = completion(**constraint, max_tokens=200, temperature=0, stream=stream)
    answer = request(reasoning.url, "POST", COMPLETIONS, asked)
    assert answer.status == 200, answer.body
    if stream:
        text = "".join(one["choices"][0]["text"] for one in told(answer.body))
    else:
        text = answer.json()["choices"][0]["text"]
    assert re.fullmatch('"?(yes|no)"?|[ab]{3}', text), text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", [{}, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}])
def test_the_continuation_of_a_prefilled_answer_is_not_reasoning(
    reasoning: DaemonProcess, fields: dict[str, Any], stream: bool
) -> None:
    """Whoever prefills an answer wants its text, and a constraint applies to that."""
    messages = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "I say:"}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 8, "stream": stream} | fields
    answer = request(reasoning.url, "POST", "/v1/messages", asked)
    assert answer.status == 200, answer.body
    if stream:
        deltas = [one["delta"] for one in told(answer.body) if one["type"] == "content_block_delta"]
        assert {one["type"] for one in deltas} == {"text_delta"}
        text = "".join(one["text"] for one in deltas)
    else:
        (block,) = answer.json()["content"]
        text = block["text"]
    assert text
    assert not fields or text in ('"yes"', '"no"')


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "look"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
    ],
    ids=["required", "named", "allowed"],
)
def test_a_demanded_call_that_no_parser_could_find_is_refused(reasoning: DaemonProcess, choice: Any) -> None:
    """As in a chat: whoever demands a call gets no free text."""
    body = {"input": "x", "tools": [TOOL], "tool_choice": choice, "max_output_tokens": 4}
    answer = request(reasoning.url, "POST", "/v1/responses", body)
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"] == "tools"
    demanded = chat(tools=[{"type": "function", "function": {"name": "look"}}], tool_choice="required")
    assert request(reasoning.url, "POST", CHAT, demanded).status == 400
