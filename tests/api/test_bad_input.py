"""Bad input through a real socket to a real daemon: each row gets its stated answer, and the daemon serves on."""

import contextlib
import json
import re
import select
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.api.http_client import (
    API_KEY,
    CHAT,
    COMPLETIONS,
    MODEL,
    chat,
    completion,
    connect,
    head,
    post,
    request,
    talk,
)
from tests.patience import PATIENCE_S
from tests.serve.daemon_process import DaemonProcess

SCHEMA_BOMB: dict[str, Any] = {"$ref": "#"}
CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


class Row(NamedTuple):
    """A body and its expected answer."""

    name: str
    path: str
    body: Any
    param: str | None
    status: int = 400


def raw(inner: bytes) -> bytes:
    """Return a chat body whose extra field, `seed`, has exactly these bytes."""
    return json.dumps(chat()).encode()[:-1] + b', "seed": ' + inner + b"}"


def messages(*found: Any) -> dict[str, Any]:
    return chat(messages=list(found))


def schema(found: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": found}})


def tool(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look", "parameters": parameters}}]


def image(url: str) -> dict[str, Any]:
    return messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})


BODIES = [
    Row("empty", CHAT, b" ", None),
    Row("not-json", CHAT, b"hello", None),
    Row("truncated", CHAT, json.dumps(chat()).encode()[:-5], None),
    Row("invalid-utf8", CHAT, b'{"model": "\xff"}', None),
    Row("lone-surrogate", CHAT, raw(b'"\\ud800"'), "seed"),
    Row("lone-surrogate-in-text", CHAT, b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "messages"),
    Row("array", CHAT, b"[]", None),
    Row("null", CHAT, b"null", None),
    Row("nesting-100000", CHAT, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    Row("nesting-200", CHAT, raw(b"[" * 200 + b"]" * 200), "seed"),
    Row("nan", CHAT, raw(b"NaN"), None),
    Row("1e999", CHAT, raw(b"1e999"), "seed"),
    Row("5000-digits", CHAT, raw(b"9" * 5000), None),
    Row("4000-digits", CHAT, raw(b"9" * 4000), "seed"),
    Row("key-twice", CHAT, b'{"model": "a", "model": "b"}', "model"),
]
MESSAGES = [
    Row("messages-missing", CHAT, {"model": MODEL}, "messages"),
    Row("messages-empty", CHAT, messages(), "messages"),
    Row("messages-a-string", CHAT, chat(messages="Hello"), "messages"),
    Row("unknown-role", CHAT, messages({"role": "wizard", "content": "x"}), "messages.0.role"),
    Row("content-an-integer", CHAT, messages({"role": "user", "content": 5}), "messages.0.content"),
    Row("message-a-string", CHAT, messages("Hello"), "messages.0"),
    Row("no-message-in-an-input", "/v1/responses", {"input": []}, "input"),
    Row("prompt-missing", COMPLETIONS, {"model": MODEL}, "prompt"),
]
PARAMETERS = [
    Row("temperature--1", CHAT, chat(temperature=-1), "temperature"),
    Row("top_p-0", CHAT, chat(top_p=0), "top_p"),
    Row("n-0", CHAT, chat(n=0), "n"),
    Row("n-100000", CHAT, chat(n=100_000), "n"),
    Row("max_tokens-0", CHAT, chat(max_tokens=0), "max_tokens"),
    Row("max_tokens--1", CHAT, chat(max_tokens=-1), "max_tokens"),
    Row("max_tokens-1e9", CHAT, chat(max_tokens=1e9), "max_tokens"),
    Row("max_completion_tokens-1e9", CHAT, chat(max_completion_tokens=10**9), "max_completion_tokens"),
    Row("min_tokens-above-max_tokens", CHAT, chat(min_tokens=5), "min_tokens"),
    Row("seed-2^70", CHAT, chat(seed=2**70), "seed"),
    Row("seed-2^63", CHAT, chat(seed=2**63), "seed"),
    Row("logit_bias-a-list", CHAT, chat(logit_bias=[1]), "logit_bias"),
    Row("logit_bias-no-number", CHAT, chat(logit_bias={"word": 1}), "logit_bias"),
    Row("logit_bias-out-of-vocabulary", CHAT, chat(logit_bias={"99999": 1}), "logit_bias"),
    Row("10000-stop-strings", CHAT, chat(stop=[f"stop {i}" for i in range(10_000)]), "stop"),
    Row("prompt-beyond-the-context", CHAT, messages({"role": "user", "content": "word " * 40_000}), "messages"),
    Row("tokens-beyond-the-context", COMPLETIONS, completion(prompt=[9] * 40_000), "prompt"),
    Row("token--1", COMPLETIONS, completion(prompt=[-1]), "prompt.0"),
    Row("token-out-of-vocabulary", COMPLETIONS, completion(prompt=[1, 99_999]), "prompt"),
    Row("logprobs-10000", COMPLETIONS, completion(logprobs=10_000), "logprobs"),
    Row("top_logprobs-10000", CHAT, chat(logprobs=True, top_logprobs=10_000), "top_logprobs"),
    Row(
        "prompt_logprobs-of-much",
        COMPLETIONS,
        completion(prompt=[[5] * 1500] * 8, prompt_logprobs=9),
        "prompt_logprobs",
    ),
    Row("prompt_logprobs-all", CHAT, chat(prompt_logprobs=-1), "prompt_logprobs"),
    Row("echo-of-much", COMPLETIONS, completion(prompt=[5] * 5000, echo=True, logprobs=20), "logprobs"),
    Row("no-prompt-in-a-list", COMPLETIONS, completion(prompt=[]), "prompt"),
    Row("no-token-in-a-prompt", COMPLETIONS, completion(prompt=[[]]), "prompt"),
    Row("part-of-no-type", CHAT, messages({"role": "user", "content": [{"type": "smell"}]}), "messages"),
    Row("part-without-its-field", CHAT, messages({"role": "user", "content": [{"type": "image_url"}]}), "messages"),
    Row("2000-prompts", COMPLETIONS, completion(prompt=["x"] * 2000), "prompt"),
    Row("100-prompts-100-choices", COMPLETIONS, completion(prompt=["x"] * 100, n=100), "n"),
    Row("repetition_penalty-1e-300", CHAT, chat(repetition_penalty=1e-300), "repetition_penalty"),
    Row("length_penalty--1e300", CHAT, chat(use_beam_search=True, length_penalty=-1e300), "length_penalty"),
    Row("priority-a-word", CHAT, chat(priority="high"), "priority"),
    Row("priority-a-fraction", CHAT, chat(priority=0.5), "priority"),
    Row("priority-2^40", CHAT, chat(priority=2**40), "priority"),
    Row("priority-beyond-the-key's", CHAT, chat(priority=-1), "priority"),
    Row("unknown-tier", CHAT, chat(service_tier="swift"), "service_tier"),
    Row("unknown-tier-of-a-response", "/v1/responses", {"input": "x", "service_tier": "swift"}, "service_tier"),
    Row("unknown-tier-of-an-embedding", "/v1/embeddings", {"input": "x", "service_tier": 1}, "service_tier"),
    Row("n-a-word", CHAT, chat(n="many"), "n"),
    Row("stream_options-without-stream", CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
]
SCHEMAS = [
    Row("json_schema-a-word", CHAT, schema("object"), "response_format.json_schema.schema"),
    Row("json_schema-unknown-type", CHAT, schema({"type": "wizard"}), "response_format"),
    Row("json_schema-without-schema", CHAT, chat(response_format={"type": "json_schema"}), "response_format"),
    Row("recursive-ref", CHAT, schema(SCHEMA_BOMB), "response_format"),
    Row("recursive-ref-two-steps", CHAT, schema(CIRCLE), "response_format"),
    Row("recursive-ref-in-anyOf", CHAT, schema({"anyOf": [{"type": "string"}, {"$ref": "#"}]}), "response_format"),
    Row("ref-to-nowhere", CHAT, schema({"$ref": "#/$defs/missing"}), "response_format"),
    Row("ref-to-a-file", CHAT, schema({"$ref": "file:///etc/passwd"}), "response_format"),
    Row("recursive-structured-output", CHAT, chat(structured_outputs={"json": SCHEMA_BOMB}), "structured_outputs"),
    Row("recursive-ref-in-text", CHAT, chat(structured_outputs={"json": '{"$ref": "#"}'}), "structured_outputs"),
    Row("recursive-tool", CHAT, chat(tools=tool(SCHEMA_BOMB), tool_choice="required"), "tools"),
    Row("structured-output-a-list", CHAT, chat(structured_outputs=["a"]), "structured_outputs"),
    Row("structured-output-a-word", COMPLETIONS, completion(structured_outputs="json"), "structured_outputs"),
    Row("invalid-regex", CHAT, chat(structured_outputs={"regex": "(["}), "structured_outputs"),
    Row("invalid-grammar", CHAT, chat(structured_outputs={"grammar": "root ::= ("}), "structured_outputs"),
    Row(
        "nothing-allowed", CHAT, chat(structured_outputs={"choice": ["a"]}, allowed_token_ids=[7]), "allowed_token_ids"
    ),
    Row("tool_choice-without-tools", CHAT, chat(tool_choice="required"), "tool_choice"),
    Row("tool_choice-auto-without-tools", CHAT, chat(tool_choice="auto"), "tool_choice"),
    Row("tool_choice-of-no-tool", CHAT, chat(tools=tool({}), tool_choice={"type": "function"}), "tool_choice.function"),
    Row("chat-template", CHAT, chat(chat_template="{{ 1 }}"), "chat_template"),
    Row(
        "chat-template-override",
        CHAT,
        chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}),
        "chat_template_kwargs",
    ),
    Row("template-in-tokenize", "/tokenize", chat(chat_template="{{ 1 }}"), "chat_template"),
    Row("file-image", CHAT, image("file:///etc/passwd"), "messages.0.content"),
    Row("image-without-vision", CHAT, image("data:image/png;base64,AAAA"), "messages"),
]
NOT_LET_THROUGH = [
    Row("kv_transfer_params", CHAT, chat(kv_transfer_params={"do_remote_prefill": True}), "kv_transfer_params"),
    Row("ec_transfer_params", CHAT, chat(ec_transfer_params={"a": 1}), "ec_transfer_params"),
    Row(
        "kv_transfer_params-in-xargs",
        CHAT,
        chat(vllm_xargs={"kv_transfer_params": "x"}),
        "vllm_xargs.kv_transfer_params",
    ),
    Row("request_id-newline", CHAT, chat(request_id="a\nb"), "request_id"),
    Row("request_id-7kB", CHAT, chat(request_id="a" * 7000), "request_id"),
    Row("session_id-7kB", CHAT, chat(session_id="a" * 7000), "session_id"),
    Row("best_of", COMPLETIONS, completion(best_of=3), "best_of"),
    Row("guided_json", CHAT, chat(guided_json={}), "guided_json"),
    Row("functions", CHAT, chat(functions=[{"name": "look", "parameters": {}}]), "functions"),
    Row("conversation", "/v1/responses", {"input": "x", "conversation": "conv_1"}, "conversation"),
    Row("guided_regex", CHAT, chat(guided_regex="a+"), "guided_regex"),
    Row("mm_processor_kwargs", CHAT, chat(mm_processor_kwargs={"a": 1}), "mm_processor_kwargs"),
    Row("prompt_embeds", COMPLETIONS, {"model": MODEL, "prompt_embeds": "AAAA"}, "prompt_embeds"),
    Row("unknown-model", CHAT, chat(model="other"), "model", 404),
    Row("unknown-model-completions", COMPLETIONS, completion(model="other"), "model", 404),
    Row("tokenize-1-MiB", "/tokenize", {"model": MODEL, "prompt": "a" * (1 << 20)}, None, 413),
    Row("detokenize-768-KiB", "/detokenize", {"model": MODEL, "tokens": [5] * (1 << 18)}, None, 413),
    Row("no-embeddings", "/v1/embeddings", {"model": MODEL, "input": "x"}, "model"),
    Row("empty-input", "/v1/responses", {"model": MODEL}, "input"),
    Row("response-tool_choice", "/v1/responses", {"input": "x", "tool_choice": "required"}, "tool_choice"),
]
ROWS = [*BODIES, *MESSAGES, *PARAMETERS, *SCHEMAS, *NOT_LET_THROUGH]


@pytest.fixture(autouse=True)
def _serves_on(strict: DaemonProcess) -> Iterator[None]:
    """Check after each row that the daemon serves a normal request."""
    yield
    answer = request(strict.url, "POST", CHAT, chat(max_tokens=1))
    assert answer.status == 200, answer.body
    assert strict.process.poll() is None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_bad_body_is_answered_with_what_is_wrong(strict: DaemonProcess, row: Row) -> None:
    """A client learns which field to fix, in OpenAI's format, whatever it sends."""
    answer = request(strict.url, "POST", row.path, row.body)
    assert answer.status == row.status, answer.body
    if row.status != 200:
        error = answer.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert error["param"] == row.param, error
        assert error["code"] is None or isinstance(error["code"], str)


def test_a_bad_entry_is_told_only_its_own_mistake(strict: DaemonProcess) -> None:
    """Not what it would need to be something else."""
    for part, said in (
        ({"type": "smell"}, "entry 0 has an unknown type: use one of 'text', 'image_url', 'input_audio', 'file'"),
        ({"type": "image_url"}, "entry 0: image_url: Field required"),
        ({"type": "text", "text": 5}, "entry 0: text: Input should be a valid string"),
    ):
        answer = request(strict.url, "POST", CHAT, messages({"role": "user", "content": [part]}))
        assert answer.json()["error"]["message"] == said


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank", "/score", "/classify", "/pooling"])
def test_a_generative_model_says_how_to_serve_embeddings(strict: DaemonProcess, path: str) -> None:
    """One line says what to do instead."""
    said = request(strict.url, "POST", path, {"model": MODEL, "input": "x"}).json()["error"]["message"]
    assert "runner = 'pooling'" in said
    assert CHAT in said


NOT_BEFORE_A_TOKEN = ("stream_options-without-stream", "nothing-allowed", "prompt_logprobs-all")
STREAMED = [row for row in [*PARAMETERS, *SCHEMAS] if row.path == CHAT and row.name not in NOT_BEFORE_A_TOKEN]


@pytest.mark.parametrize("row", STREAMED, ids=lambda row: row.name)
def test_a_stream_that_cannot_start_gets_an_error_status(strict: DaemonProcess, row: Row) -> None:
    """No 200 with an error inside."""
    answer = request(strict.url, "POST", row.path, row.body | {"stream": True})
    assert answer.status == row.status, answer.body
    assert answer.json()["error"]["param"] == row.param, answer.body


SHOWN = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": None}]}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("no-messages", {"model": MODEL, "max_tokens": 4}),
        ("temperature", chat(temperature=-1)),
        ("too-long", messages({"role": "user", "content": "word " * 40_000}) | {"stream": True}),
        ("unknown-role", messages({"role": "wizard", "content": "x"})),
        ("an-image-without-its-source", messages({"role": "user", "content": [SHOWN]})),
    ],
)
def test_anthropic_clients_get_anthropic_errors(strict: DaemonProcess, name: str, body: dict[str, Any]) -> None:
    """Anthropic's client raises the right exception only when it can parse the error."""
    answer = request(strict.url, "POST", "/v1/messages", body)
    assert answer.status == 400, answer.body
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"]


# -- HTTP -----------------------------------------------------------------------------------------------------------


def checked(answer: bytes, status: int, code: str | None = None) -> None:
    first, _, rest = answer.partition(b"\r\n")
    assert first.split()[1] == str(status).encode(), answer[:500]
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if code is not None:
        assert error["code"] == code


GET = {"method": "GET", "path": "/v1/models"}


@pytest.mark.parametrize(
    ("name", "sent", "status"),
    [
        ("a-header-over-8-kB", head("X-Long: " + "a" * 9000, **GET), 431),
        ("200-headers", head(*(f"X-{i}: a" for i in range(200)), **GET), 431),
        ("a-url-over-4-kB", head(method="GET", path="/" + "a" * 5000), 414),
        ("negative-content-length", head("Content-Length: -1"), 400),
        ("content-length-twice", head("Content-Length: 1", "Content-Length: 2"), 400),
        ("length-and-chunks", head("Content-Length: 1", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
        ("not-http", b"hello\r\n\r\n", 400),
        ("bad-chunk", head("Transfer-Encoding: chunked") + b"zz\r\n", 400),
        ("wrong-method", head(method="GET"), 405),
        ("post-to-a-page", head("Content-Length: 0", path="/v1/models"), 405),
        ("unknown-path", head(method="GET", path="/v1/nothing"), 404),
        ("unknown-model-page", head(method="GET", path="/v1/models/none"), 404),
        ("body-over-the-limit", head("Content-Length: 99000000") + b" " * 1000, 413),
        ("chunks-over-the-limit", head("Transfer-Encoding: chunked") + b"200000\r\n" + b" " * 0x200000 + b"\r\n", 413),
        ("no-key", head(key=""), 401),
        ("wrong-key", head(key="wrong"), 401),
        ("key-beside-ascii", head(key="\u20ac"), 401),
        ("empty-body", head("Content-Length: 0"), 400),
        ("unknown-encoding", head("Content-Encoding: br", "Content-Length: 1") + b"x", 415),
        ("request-id-header-7kB", head("X-Request-Id: " + "a" * 7000, "Content-Length: 2") + b"{}", 400),
        ("request-id-header-with-a-space", head("X-Request-Id: a b", "Content-Length: 2") + b"{}", 400),
    ],
)
def test_bad_http_is_answered_not_dropped(strict: DaemonProcess, name: str, sent: bytes, status: int) -> None:
    """Whoever debugs a proxy or a client sees why, in an error body that its client can parse."""
    checked(talk(strict.url, sent), status)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", "Host"),
        (head("Content-Type: text/plain", "Content-Length: 2") + b"{}", "Content-Type"),
        (head(method="post"), "method"),
    ],
)
def test_an_http_violation_is_named_in_the_answer(strict: DaemonProcess, sent: bytes, why: str) -> None:
    """A proxy that sends a header twice is found by what the answer says."""
    answer = talk(strict.url, sent)
    checked(answer, 400, "malformed_request")
    assert why in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types_are_refused(strict: DaemonProcess, content_type: str) -> None:
    """A browser form cannot be made to talk to the engine."""
    answer = request(strict.url, "POST", CHAT, chat(), {"Content-Type": content_type})
    assert answer.status == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "br", "gzip, gzip", "x-unknown"])
def test_a_compressed_body_is_refused(strict: DaemonProcess, coding: str) -> None:
    """The answer says not to compress."""
    answer = request(strict.url, "POST", CHAT, chat(), {"Content-Encoding": coding})
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (415, "unsupported_encoding")
    assert error["message"] == "compressed bodies are not supported: remove Content-Encoding"


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HT", head()[:-10]])
def test_a_slow_head_times_out(strict: DaemonProcess, sent: bytes) -> None:
    """Connections that never say what they want do not pile up."""
    began_s = time.monotonic()
    checked(talk(strict.url, sent), 408)
    assert time.monotonic() - began_s > 0.8


def test_a_slow_body_times_out(strict: DaemonProcess) -> None:
    """A body that never comes holds no place."""
    checked(talk(strict.url, head("Content-Length: 100") + b'{"model":'), 408)


def test_a_slow_second_head_times_out(strict: DaemonProcess) -> None:
    """The limit holds for every request of a kept-alive connection."""
    first = f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n\r\n".encode()
    with connect(strict.url) as connection:
        connection.sendall(first)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(b"GET /v1/mo")
        checked(b"".join(iter(lambda: connection.recv(65536), b"")), 408)


def test_health_and_readiness_need_no_key(strict: DaemonProcess) -> None:
    """An orchestrator's probes carry no secret."""
    for path in ("/health", "/ready"):
        assert request(strict.url, "GET", path, headers={"Authorization": "Bearer wrong"}).status == 200
    for path in ("/metrics", "/version", "/v1/models"):
        assert request(strict.url, "GET", path, headers={"Authorization": "Bearer wrong"}).status == 401


def test_anthropic_s_key_header_is_accepted(strict: DaemonProcess) -> None:
    """The official Anthropic client needs no setting but the address."""
    headers = {"Authorization": "", "x-api-key": API_KEY}
    assert request(strict.url, "GET", "/v1/models", headers=headers).status == 200


def test_clients_are_told_to_retry_when_all_places_are_taken(strict: DaemonProcess) -> None:
    """Overload is a quick 429 that clients know to wait for, and clients that leave free their places."""
    sent = post(chat(max_tokens=3000, stream=True, ignore_eos=True))
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connect(strict.url)) for _ in range(71)]
        for connection in waiting:
            connection.sendall(sent)
        refused = b""
        while not refused:
            readable, _, _ = select.select(waiting, [], [], PATIENCE_S)
            assert readable, "nobody is told anything"
            waiting = [connection for connection in waiting if connection not in readable]
            heads = [connection.recv(1 << 16) for connection in readable]
            refused = next((head for head in heads if head.startswith(b"HTTP/1.1 429 ")), b"")
        assert b"rate_limit_error" in refused
        assert int(re.search(rb"(?i)retry-after: (\d+)", refused)[1]) >= 1  # type: ignore[index]
        assert request(strict.url, "GET", "/health").status == 200
    deadline_s = time.monotonic() + PATIENCE_S
    while request(strict.url, "POST", CHAT, chat(max_tokens=1)).status != 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)  # another process: asking it is the only way to know
