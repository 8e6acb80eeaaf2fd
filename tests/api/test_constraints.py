"""Constraints on outputs: each is judged in every form, and none holds up other clients."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.http_client import CHAT, COMPLETIONS, chat, completion, connect, post, request
from tests.serve.daemon_process import DaemonProcess

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
Way = Callable[[Any], tuple[str, dict[str, Any], str]]


def _tool(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": schema} | fields}


def _tagged(schema: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}


def _legacy(schema: Any) -> dict[str, Any]:
    return {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a"]}


def _named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _anthropic(**fields: Any) -> dict[str, Any]:
    return chat() | fields


WAYS: dict[str, Way] = {
    "response_format": lambda s: (CHAT, chat(response_format=_named(s)), "response_format"),
    "response_format-tag": lambda s: (CHAT, chat(response_format=_tagged(s)), "response_format"),
    "response_format-legacy-tag": lambda s: (
        CHAT,
        chat(response_format={"type": "structural_tag"} | _legacy(s)),
        "response_format",
    ),
    "completion": lambda s: (COMPLETIONS, completion(response_format=_named(s)), "response_format"),
    "json": lambda s: (CHAT, chat(structured_outputs={"json": s}), "structured_outputs"),
    "json-text": lambda s: (CHAT, chat(structured_outputs={"json": json.dumps(s)}), "structured_outputs"),
    "tag": lambda s: (CHAT, chat(structured_outputs={"structural_tag": json.dumps(_tagged(s))}), "structured_outputs"),
    "legacy-tag": lambda s: (
        COMPLETIONS,
        completion(structured_outputs={"structural_tag": json.dumps(_legacy(s))}),
        "structured_outputs",
    ),
    "tools-required": lambda s: (CHAT, chat(tools=[_tool(s)], tool_choice="required"), "tools"),
    "tools-named": lambda s: (
        CHAT,
        chat(tools=[_tool(s)], tool_choice={"type": "function", "function": {"name": "look"}}),
        "tools",
    ),
    "tools-strict": lambda s: (CHAT, chat(tools=[_tool(s, strict=True)]), "tools"),
    "responses": lambda s: (
        RESPONSES,
        {"input": "x", "max_output_tokens": 4, "text": {"format": {"type": "json_schema", "name": "x", "schema": s}}},
        "text",
    ),
    "responses-tag": lambda s: (
        RESPONSES,
        {"input": "x", "max_output_tokens": 4, "structured_outputs": {"structural_tag": json.dumps(_tagged(s))}},
        "structured_outputs",
    ),
    "anthropic": lambda s: (
        MESSAGES,
        _anthropic(output_config={"format": {"type": "json_schema", "schema": s}}),
        "output_config",
    ),
    "anthropic-tools": lambda s: (
        MESSAGES,
        _anthropic(tools=[{"name": "look", "input_schema": s}], tool_choice={"type": "any"}),
        "tools",
    ),
}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CIRCLE = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}, "required": ["a"]}


@pytest.mark.parametrize("way", WAYS)
def test_a_schema_is_judged_in_every_form(strict: DaemonProcess, way: str) -> None:
    """A client's mistake is a 400 with the reason, never a 500; a good schema is used."""
    path, body, param = WAYS[way](CIRCLE)
    answer = request(strict.url, "POST", path, body)
    assert answer.status == 400, answer.body
    error = answer.json()["error"]
    assert "refers to itself" in error["message"]
    assert path == MESSAGES or error["param"] == param
    path, body, _ = WAYS[way](OBJECT)
    answer = request(strict.url, "POST", path, body)
    assert answer.status == 200, answer.body


def test_a_tool_call_that_is_no_object_is_not_a_client_error(strict: DaemonProcess) -> None:
    """Anthropic's API has no word for it: the client may retry, and no operator is paged for it."""
    tool = {"name": "look", "input_schema": {"type": "array", "maxItems": 0}, "strict": True}
    asked = _anthropic(tools=[tool], tool_choice={"type": "tool", "name": "look"}, max_tokens=1000)
    answer = request(strict.url, "POST", MESSAGES, asked)
    assert answer.status == 502, answer.body
    assert answer.json()["error"]["message"].startswith("the model called look with arguments that are not")


@pytest.mark.parametrize(
    ("constraint", "status"),
    [
        ({"grammar": 'root ::= root "a" | "b"'}, 200),
        ({"grammar": "root ::= root"}, 400),
        ({"grammar": "root ::= ("}, 400),
        ({"regex": "(["}, 400),
        ({"regex": "a+"}, 200),
        ({"json": {"type": "integer", "maximum": 1e300}}, 200),
        ({"json": {"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/%61"}}, 200),
        ({"json": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}, 400),
        ({"choice": ["a", "b"]}, 200),
        ({"choice": []}, 400),
        ({"structural_tag": "{"}, 400),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_constraint_works_or_is_refused(strict: DaemonProcess, constraint: dict[str, Any], status: int) -> None:
    """Earlier requests make no difference, and it is never a server error."""
    for kind in ({"choice": ["first"]}, constraint, constraint):
        answer = request(strict.url, "POST", CHAT, chat(structured_outputs=kind))
        assert answer.status == (200 if "first" in str(kind) else status), answer.body
    if status == 400:
        assert answer.json()["error"]["param"] == "structured_outputs"


HEAVY = chat(structured_outputs={"choice": [f"option {i:06d}" for i in range(50_000)]})
LIGHT = chat(structured_outputs={"choice": ["a", "b"]})


def test_a_constraint_beyond_its_budget_is_refused(strict: DaemonProcess) -> None:
    """Its client learns that it is too complex instead of waiting forever."""
    answer = request(strict.url, "POST", CHAT, HEAVY)
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["code"] == "constraint_too_complex"


def test_an_abandoned_constraint_holds_nobody_up(strict: DaemonProcess) -> None:
    """Sending something heavy and leaving does not take structured outputs from everybody else."""
    with connect(strict.url) as connection:
        connection.sendall(post(HEAVY | {"seed": 1}))
        connection.settimeout(0.7)
        with contextlib.suppress(TimeoutError):
            connection.recv(1)
    answer = request(strict.url, "POST", CHAT, LIGHT)
    assert answer.status == 200, answer.body
