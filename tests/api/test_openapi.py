"""`/openapi.json` describes the actual API: every route, with the bodies it accepts and returns."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from melld.api.answers import Answer, Dialect
from melld.api.guards.request import REFUSED
from tests.api.http_client import CHAT, chat, completion, request
from tests.serve.daemon_process import DaemonProcess

API = Path(__file__).parents[2] / "melld" / "api"
Document = dict[str, Any]


@pytest.fixture(scope="module")
def document(daemon: DaemonProcess) -> Document:
    """The document that a real daemon serves."""
    found: Document = json.loads(daemon.get("/openapi.json"))
    return found


def fits(document: Document, value: Any, schema: dict[str, Any]) -> None:
    """Fail where the value does not match the document's schema."""
    whole = {"components": document["components"]} | schema
    jsonschema.Draft202012Validator(whole).validate(value)


def answer_schema(document: Document, path: str, method: str, status: str) -> dict[str, Any]:
    answers = document["paths"][path][method]["responses"]
    found: dict[str, Any] = answers[status]["content"]["application/json"]["schema"]
    return found


def keys_of(module: str, table: str) -> set[str]:
    """Return the keys of a table in the source: importing it would bring vLLM into the tests' process."""
    for node in ast.parse((API / module).read_text()).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else target
        if isinstance(target, ast.Name) and target.id == table:
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError(f"{module} has no {table}")


def test_every_route_is_described(document: Document) -> None:
    """A client generated from the document can do everything that the daemon does."""
    calls, pages = keys_of("calls.py", "CALLS"), keys_of("pages.py", "PAGES")
    asked = keys_of("stored_responses.py", "ASKED")
    assert set(document["paths"]) == calls | pages | asked | {"/v1/models/{model}"}


def test_keyless_routes_are_marked(document: Document) -> None:
    """A client sends its key where it is needed, and nowhere else."""
    open_paths = {
        path for path, item in document["paths"].items() for operation in item.values() if "security" in operation
    }
    assert open_paths == {"/", "/health", "/ready"}
    assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key"}


def test_every_computing_route_offers_priority(document: Document) -> None:
    """A generated client has the fields, though vLLM's models lack them."""
    knowing = set()
    for path in keys_of("calls.py", "CALLS"):
        [taken] = [one["schema"] for one in document["paths"][path]["post"]["requestBody"]["content"].values()]
        forms = [{"components": document["components"]} | form for form in taken.get("anyOf", [taken])]
        bad = {"service_tier": "swift", "priority": 101}
        wrong = [
            {error.path[0] for error in jsonschema.Draft202012Validator(form).iter_errors(bad) if error.path}
            for form in forms
        ]
        if {"service_tier", "priority"} in wrong:
            assert wrong == [{"service_tier", "priority"}] * len(forms), path
            knowing.add(path)
    assert keys_of("calls.py", "CALLS") - knowing == {"/v1/messages/count_tokens", "/tokenize", "/detokenize"}


def test_streaming_routes_are_marked(document: Document) -> None:
    """A generated client knows where to expect events."""
    streaming, taking = set(), set()
    for path in keys_of("calls.py", "CALLS"):
        call = document["paths"][path]["post"]
        if "text/event-stream" in call["responses"]["200"]["content"]:
            streaming.add(path)
        [schema] = [one["schema"] for one in call["requestBody"]["content"].values()]
        name = schema.get("$ref", "").rpartition("/")[2]
        if "stream" in document["components"]["schemas"].get(name, {}).get("properties", {}):
            taking.add(path)
    assert streaming == taking
    assert len(streaming) == 6


def test_every_reference_resolves(document: Document) -> None:
    """Generators stop at the first one that does not."""
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert named <= set(document["components"]["schemas"])
    assert "#/$defs" not in json.dumps(document)


def test_every_schema_is_valid(document: Document) -> None:
    """OpenAPI 3.1 takes JSON Schema 2020-12 as it is."""
    schemas = document["components"]["schemas"].values()
    parts = [
        part for schema in schemas for part in (schema | {"properties": {}}, *schema.get("properties", {}).values())
    ]
    distinct = {json.dumps(part, sort_keys=True): part for part in parts}  # most fields are of several schemas
    jsonschema.Draft202012Validator.check_schema({"allOf": [*distinct.values()]})


def test_bytes_are_described_as_base64(document: Document) -> None:
    """A generated client would send raw bytes for `binary`, which JSON cannot hold."""
    text = json.dumps(document)
    assert '"format": "binary"' not in text
    assert '"contentEncoding": "base64"' in text


def test_refused_fields_are_not_offered(document: Document) -> None:
    """Nobody is invited to send what gets a 400."""
    offered = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert offered.keys() & REFUSED.keys() == set()
    assert "temperature" in offered


@pytest.mark.parametrize(
    ("dialect", "path"),
    [(Dialect.OPENAI, CHAT), (Dialect.RESPONSES, "/v1/responses"), (Dialect.ANTHROPIC, "/v1/messages")],
    ids=[dialect.value for dialect in Dialect],
)
def test_errors_match_their_description(document: Document, dialect: Dialect, path: str) -> None:
    """The document's error body is the one that is sent, field for field."""
    body = json.loads(Answer(400, "no", code="invalid_value", param="n").body(dialect))
    schema = answer_schema(document, path, "post", "4XX")
    fits(document, body, schema)
    described = document["components"]["schemas"]
    outer = described[schema["$ref"].rpartition("/")[2]]["properties"]
    assert outer.keys() == body.keys()
    assert described[outer["error"]["$ref"].rpartition("/")[2]]["properties"].keys() == body["error"].keys()


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/status", "/v1/models", "/openapi.json"])
def test_a_page_matches_its_description(daemon: DaemonProcess, document: Document, path: str) -> None:
    """The document is true of the real daemon's pages."""
    fits(document, json.loads(daemon.get(path)), answer_schema(document, path, "get", "200"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        ("/v1/completions", completion(logprobs=1)),
        ("/v1/responses", {"model": "demo", "input": "Hello", "max_output_tokens": 4}),
        ("/v1/messages", chat()),
        ("/v1/messages/count_tokens", {"model": "demo", "messages": chat()["messages"]}),
        ("/tokenize", {"model": "demo", "prompt": "Hello"}),
        ("/detokenize", {"model": "demo", "tokens": [5, 6]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_call_matches_its_description(
    daemon: DaemonProcess, document: Document, path: str, body: dict[str, Any]
) -> None:
    """The documented body is accepted and the documented answer returned by the real daemon."""
    taken = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fits(document, body, taken)
    answer = request(daemon.url, "POST", path, body)
    assert answer.status == 200, answer.body
    fits(document, answer.json(), answer_schema(document, path, "post", "200"))


def test_the_document_needs_the_key(strict: DaemonProcess, document: Document) -> None:
    """Like everything but the page and the two health checks."""
    assert request(strict.url, "GET", "/openapi.json", headers={"Authorization": ""}).status == 401
    assert request(strict.url, "GET", "/openapi.json").json() == document
