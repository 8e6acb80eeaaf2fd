"""The guards in front of the engine: what passes and what is refused, for any input."""

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from melld.api.answers import Answer, Refusal
from melld.api.guards.json_text import MAX_CONTAINERS, MAX_ESCAPES, MAX_VALUES, parse_object
from melld.api.guards.request import Trust, check_request, check_request_id
from melld.api.keys import presented_key
from melld.config_server import ServerConfig
from melld.engine.frontend.schema import Budget, check_schema
from melld.errors import MelldError
from tests.effort import examples

DEPTH = 64
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def refusal(call: Any, *arguments: Any) -> Answer | None:
    try:
        call(*arguments)
    except Refusal as refused:
        return refused.answer
    except MelldError as error:
        return Answer(error.status, str(error), param=error.param)
    return None


def refused_param(call: Any, *arguments: Any) -> str | None:
    answer = refusal(call, *arguments)
    assert answer is not None
    assert answer.status == 400
    return answer.param


def not_taken(call: Any, *arguments: Any) -> None:
    answer = refusal(call, *arguments)
    assert answer is not None
    assert answer.status == 400


class TestJson:
    @given(st.dictionaries(st.text(), JSON), st.booleans())
    def test_valid_json_is_parsed_unchanged(self, value: dict[str, Any], ascii_only: bool) -> None:
        """No legitimate body is refused, however it is written."""
        text = json.dumps(value, ensure_ascii=ascii_only)
        assert parse_object(text.encode("utf-8"), DEPTH) == value

    @given(st.binary(max_size=200))
    def test_any_bytes_give_an_object_or_a_refusal(self, body: bytes) -> None:
        """Nothing that a client sends causes an internal error."""
        answer = refusal(parse_object, body, DEPTH)
        assert answer is None or answer.status == 400

    @pytest.mark.parametrize("depth", [2, 3, 63, 64, 65, 500, 100_000])
    def test_depth_is_counted_exactly(self, depth: int) -> None:
        """The limit matches the configuration; the body itself is the first level."""
        body = b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
        if depth <= DEPTH:
            parse_object(body, DEPTH)
        else:
            refused_param(parse_object, body, DEPTH)

    def test_many_shallow_lists_are_not_deep(self) -> None:
        """Breadth is not depth."""
        parse_object(json.dumps({"a": [[1]] * 1000}).encode(), 4)

    @settings(max_examples=examples(20), deadline=None)
    @given(st.dictionaries(st.text(), JSON), st.text('",[{\\\\', max_size=20))
    def test_values_are_counted_but_not_lookalikes_inside_strings(self, value: Any, text: str) -> None:
        """Prose is full of commas and quotes, yet it is one value."""
        body = json.dumps(value | {"text": text * 20_000})
        if body.count("\\") <= MAX_ESCAPES:
            assert parse_object(body.encode(), 1000)["text"] == text * 20_000
        for beyond in ([[]] * (MAX_CONTAINERS + 1), [1] * (MAX_VALUES + 2)):
            not_taken(parse_object, json.dumps(value | {"zz": text * 9, "zzz": beyond}).encode(), 1000)

    @pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999", "9" * 5000, "9" * 400, str(2**64)])
    def test_numbers_out_of_range_are_refused(self, number: str) -> None:
        """What one layer reads as infinity, another cannot write."""
        refused_param(parse_object, b'{"a": [' + number.encode() + b"]}", DEPTH)

    def test_lone_surrogates_are_refused_but_pairs_pass(self) -> None:
        """A lone surrogate cannot be encoded again; an emoji written as a pair can."""
        assert parse_object(b'{"a": "\\ud83d\\ude00"}', DEPTH) == {"a": "\U0001f600"}
        assert refused_param(parse_object, b'{"a": ["\\ud83d"]}', DEPTH) == "a"
        assert refused_param(parse_object, b'{"a": {"\\ude00": 1}}', DEPTH) == "a"

    def test_duplicate_keys_are_refused_at_any_depth(self) -> None:
        """Two parsers of one body must not disagree."""
        assert refused_param(parse_object, b'{"a": [{"n": 1, "n": 2}]}', DEPTH) == "n"


def _tool(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "look", "parameters": schema}}]}


class TestSchemas:
    @pytest.mark.parametrize(
        "schema",
        [
            {"$ref": "#"},
            {"allOf": [{"$ref": "#"}]},
            {"anyOf": [{"type": "string"}, {"oneOf": [{"$ref": "#"}]}]},
            {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            {"$ref": "#/$defs/nothing"},
            {"$ref": "#nothing"},
            {"$ref": "https://example.org/schema"},
            {"items": [{"$ref": "#/items/7"}]},
            {"items": [{"$ref": "#/items/\u00b2"}]},
            "object",
            [],
        ],
    )
    def test_a_schema_that_cannot_compile_is_refused(self, schema: Any) -> None:
        """It would fail inside the engine, as a 500."""
        assert refused_param(check_schema, schema, "response_format", Budget()) == "response_format"

    @pytest.mark.parametrize(
        "schema",
        [
            {},
            True,
            {"type": "array", "items": {"$ref": "#"}},
            {"type": "object", "properties": {"child": {"$ref": "#"}}},
            {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
            {"$defs": {"a/b~c": {"type": "string"}}, "$ref": "#/$defs/a~1b~0c"},
            {"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/%61"},
            {"$defs": {"a": {"$anchor": "here", "type": "string"}}, "$ref": "#here"},
            {"anyOf": [{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/s"}], "$defs": {"s": {"type": "string"}}},
        ],
    )
    def test_an_ordinary_schema_passes(self, schema: Any) -> None:
        """Trees and shared definitions are what references are for."""
        check_schema(schema, "response_format", Budget())


MANY = 200_000
"""As many of the smallest value that a guard visits as fill most of a body of 8 MiB."""
NODE: dict[str, Any] = {"a": {}}
WORST: dict[str, Callable[[], dict[str, Any]]] = {
    "anchors": lambda: _tool({"$defs": {"z": {"$anchor": "z"}}, "enum": [{"$ref": "#z"}] * 2800}),
    "many-anchors": lambda: _tool({"$defs": {"z": {"$anchor": "z"}}, "enum": [{"$ref": "#z"}] * 12_000}),
    "anchors-and-names": lambda: _tool(
        {"$defs": {f"{i}": {"$anchor": f"{i}", "$ref": f"#{i + 1}"} for i in range(20_000)}}
    ),
    "pointers": lambda: _tool({"enum": [{"$ref": "#" + "/a" * 400} for _ in range(1000)]}),
    "escapes": lambda: _tool({"$ref": "#/" + "%61" * 330_000}),
    "branches": lambda: _tool({"anyOf": [{"anyOf": [{}] * 1000}] * 250}),
    "names": lambda: _tool({"enum": [{str(i): [] for i in range(80_000)}]}),
    "constraint": lambda: {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [NODE] * MANY}}}
    },
    "choice": lambda: {"structured_outputs": {"choice": ["option"] * MANY}},
    "messages": lambda: {"messages": [{"role": "user", "content": ""}] * MANY},
    "parts": lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * MANY}]},
    "shown": lambda: {"messages": [{"role": "tool", "content": [{"content": [NODE] * MANY}]}]},
    "part-names": lambda: {"messages": [{"role": "user", "content": [{f"{i}url": "" for i in range(MANY)}]}]},
    "input": lambda: {"input": [{"role": "user", "content": [NODE] * MANY}]},
    "tokens": lambda: {"input": [5] * 4_000_000},
    "tools": lambda: {"tools": [{"input_schema": NODE}] * 35_000},
    "tool": lambda: {"tools": [{"input_schema": {"enum": [NODE] * 100_000}}]},
    "text": lambda: {"structured_outputs": {"json": f"[{'0,' * 4_000_000}0]"}},
    "stop": lambda: {"stop": ["a"] * 1_000_000, "chat_template_kwargs": {str(i): i for i in range(MANY)}},
}


class TestLoop:
    @pytest.mark.parametrize("name", WORST)
    def test_no_request_blocks_the_loop(self, name: str) -> None:
        """One client's body must not stall the other streams: 50 ms of CPU time on the loop at most."""
        body = msgspec.json.decode(msgspec.json.encode(WORST[name]()))
        began_s = time.thread_time()
        answer = refusal(check_request, body, ServerConfig(), Trust())
        assert time.thread_time() - began_s < 0.05
        assert answer is None or answer.status == 400
        assert answer is None or answer.param != "tools" or "bytes" not in answer.message, "too large to be looked at"


class TestRequests:
    @given(st.text())
    def test_request_ids_are_plain_or_refused(self, name: str) -> None:
        """An id is safe in a log line, a header and a decision log."""
        if refusal(check_request_id, name, "request_id") is not None:
            return
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set(" \n\r\"'/\\")
        assert 1 <= len(name) <= 128

    @given(st.dictionaries(st.sampled_from(["n", "prompt", "messages", "stop", "tools", "tool_choice", "text"]), JSON))
    def test_any_body_passes_or_is_refused(self, body: dict[str, Any]) -> None:
        """Wrong field types are left to vLLM's models; they break nothing here."""
        answer = refusal(check_request, body, ServerConfig(), Trust())
        assert answer is None or answer.param

    def test_fields_that_the_operator_allows_pass(self) -> None:
        """Templates and media options are off by default, but an operator can allow them."""
        body = {"chat_template": "{{ 1 }}", "mm_processor_kwargs": {"a": 1}}
        check_request(body, ServerConfig(), Trust(chat_template=True, multimodal_kwargs=True))
        assert refused_param(check_request, body, ServerConfig(), Trust()) == "chat_template"

    def test_best_of_equal_to_n_passes(self) -> None:
        """Some clients always send their library's default, which asks for no selection."""
        for body in ({"best_of": 1}, {"best_of": 3, "n": 3}, {"best_of": None}):
            check_request(body, ServerConfig(), Trust())
        for body in ({"best_of": 2}, {"best_of": 3, "n": 2}, {"best_of": [1]}):
            assert refused_param(check_request, body, ServerConfig(), Trust()) == "best_of"

    def test_roles_that_the_operator_allows_pass(self) -> None:
        """Some models' templates know more roles than OpenAI."""
        body = {"messages": [{"role": "ipython", "content": "1"}]}
        check_request(body, ServerConfig(extra_roles=("ipython",)), Trust())
        assert refused_param(check_request, body, ServerConfig(), Trust()) == "messages.0.role"


def test_a_byte_order_mark_is_skipped() -> None:
    """PowerShell and Windows editors start files with one."""
    assert parse_object(b'\xef\xbb\xbf{"model": "a"}', 8) == {"model": "a"}


def test_bearer_tokens_and_anthropic_key_headers_both_work() -> None:
    """OpenAI's clients send a bearer token, Anthropic's a header of their own."""
    assert presented_key("Bearer a", None) == "a"
    assert presented_key("bearer  a ", "b") == "a"
    assert presented_key("Basic a", "b") == "b"
    assert presented_key(None, "b") == "b"
    assert presented_key("Bearer ", None) is None


class TestHistory:
    """The limit on conversation length is the same in every API's format."""

    LIMITS = ServerConfig(max_message_parts=6, max_tool_arguments=5)
    CALL: dict[str, Any] = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}  # noqa: RUF012
    PARTS: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}  # noqa: RUF012

    @pytest.mark.parametrize("name", ["messages", "input"])
    def test_messages_parts_and_calls_share_one_limit(self, name: str) -> None:
        """One message of a thousand parts is as long as a thousand messages."""
        plain = {"role": "user", "content": "a"}
        assert refusal(check_request, {name: [plain, self.CALL, self.PARTS]}, self.LIMITS, Trust()) is None
        assert refused_param(check_request, {name: [plain, plain, self.CALL, self.PARTS]}, self.LIMITS, Trust()) == name

    @pytest.mark.parametrize("name", ["messages", "input"])
    def test_tool_call_arguments_count_together(self, name: str) -> None:
        """They are parsed again for each answer."""
        assert refusal(check_request, {name: [self.CALL, self.CALL]}, self.LIMITS, Trust()) is None
        assert refused_param(check_request, {name: [self.CALL] * 3}, self.LIMITS, Trust()) == name

    def test_function_calls_in_responses_count_too(self) -> None:
        """Their arguments stand in the entry itself."""
        call = {"type": "function_call", "name": "f", "arguments": "{1234}"}
        assert refused_param(check_request, {"input": [call]}, self.LIMITS, Trust()) == "input"
