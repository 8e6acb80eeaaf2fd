"""The OpenAPI 3.1 document of the API, at `/openapi.json`.

Owns what it says of pages and stored responses.  The rest is generated: the bodies from vLLM's pydantic models and
melld's own Structs, the calls from `melld.api.calls`, the refused fields from `melld.api.guards.request`.
"""

import functools
import re
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel, TypeAdapter
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList

from melld.api.answers import JSON, Dialect
from melld.api.calls import CALLS
from melld.api.guards.body import FORM
from melld.api.guards.request import REFUSED, REQUEST_ID
from melld.api.guards.tiers import TIERS
from melld.api.stored_responses import ASKED
from melld.config_values import MOST_PRIORITY
from melld.control.status import DaemonStatus
from melld.nested import containers

REFERENCE = "#/components/schemas/{model}"
SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}]


class Problem(msgspec.Struct, frozen=True):
    """An error in OpenAI's form."""

    message: str
    """Text for people."""
    type: str
    """OpenAI's type of error."""
    param: str | None
    """The field at fault."""
    code: str | None
    """Code for programs."""


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 or more, except on Anthropic's endpoints."""

    error: Problem


class AnthropicProblem(msgspec.Struct, frozen=True):
    """An error in Anthropic's form."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """The body of an error on Anthropic's endpoints."""

    type: str
    error: AnthropicProblem


class Health(msgspec.Struct, frozen=True):
    """Sign that the daemon's event loop runs."""

    status: str


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer of `/ready`: requests are served, or why not."""

    status: str
    reason: str = ""


class Deleted(msgspec.Struct, frozen=True):
    """A deleted response."""

    id: str
    object: str
    deleted: bool


class Versions(msgspec.Struct, frozen=True):
    """Versions of melld and vLLM."""

    version: str
    vllm: str


class Plain(NamedTuple):
    """The answer to a request without a body: a model, or only a media type."""

    gives: Any
    summary: str
    media_type: str = "application/json"
    open: bool = False
    """Served without a key."""


_STORED, _CANCEL = ASKED
PLAIN: dict[tuple[str, str], Plain] = {
    ("/", "get"): Plain(None, "Dashboard that shows /status live", "text/html", open=True),
    ("/health", "get"): Plain(Health, "Liveness: the daemon's event loop runs", open=True),
    ("/ready", "get"): Plain(Readiness, "Readiness: 503 with the reason if no request can be served", open=True),
    ("/version", "get"): Plain(Versions, "Versions of melld and vLLM"),
    ("/metrics", "get"): Plain(None, "Metrics in Prometheus text format", "text/plain"),
    ("/status", "get"): Plain(DaemonStatus, "Current workers and requests"),
    ("/openapi.json", "get"): Plain(None, "This document"),
    ("/v1/models", "get"): Plain(ModelList, "Served models"),
    ("/v1/models/{model}", "get"): Plain(ModelCard, "One model"),
    (_STORED, "get"): Plain(ResponsesResponse, "A stored response, complete or in progress"),
    (_STORED, "delete"): Plain(Deleted, "Delete a stored response, cancelling it if it is running"),
    (_CANCEL, "post"): Plain(ResponsesResponse, "Cancel a background response"),
}
"""By path and method."""


@functools.cache
def openapi_document() -> bytes:
    """Return the document as JSON."""
    schemas, components = _schemas()
    paths: dict[str, Any] = {path: {"post": _call(path, schemas)} for path in CALLS}
    for (path, method), plain in PLAIN.items():
        paths.setdefault(path, {})[method] = _plain(path, method, plain, schemas)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "melld",
            "version": version("melld"),
            "description": "Bodies that vLLM validates use vLLM's models; docs/api.md lists the differences.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": SECURITY,
    }
    return msgspec.json.encode(document)


def _schemas() -> tuple[dict[tuple[str, str], Any], dict[str, Any]]:
    """Return the schema of each (call, `takes` or `gives`) and (path, method), and the components that they name."""
    plain = {place: one.gives for place, one in PLAIN.items() if one.gives is not None}
    of_vllm = {place: gives for place, gives in plain.items() if issubclass(gives, BaseModel)}
    ours = {place: gives for place, gives in plain.items() if place not in of_vllm}
    wanted = [((path, "takes"), "validation", TypeAdapter(call.takes)) for path, call in CALLS.items()]
    wanted += [((path, "gives"), "serialization", TypeAdapter(call.gives)) for path, call in CALLS.items()]
    wanted += [(place, "serialization", TypeAdapter(gives)) for place, gives in of_vllm.items()]
    found, definitions = TypeAdapter.json_schemas(wanted, ref_template=REFERENCE)  # type: ignore[arg-type]
    made, described = msgspec.json.schema_components(
        [*ours.values(), ErrorBody, AnthropicErrorBody], ref_template="#/components/schemas/{name}"
    )
    schemas = {place: schema for (place, _), schema in found.items()} | dict(zip(ours, made, strict=False))
    components = definitions["$defs"] | described
    for path, call in CALLS.items():
        if call.engine:
            _say_who_goes_first(schemas[path, "takes"], components)
    for schema in components.values():
        _leave_out_refused(schema)
    _name_the_encodings(components)
    return schemas, components


def _say_who_goes_first(takes: dict[str, Any], components: dict[str, Any]) -> None:
    """Add the priority fields to every request body."""
    for form in takes.get("anyOf", [takes]):
        components[form["$ref"].rpartition("/")[2]]["properties"] |= {
            "service_tier": {"enum": [*TIERS, None]},
            "priority": {"type": "integer", "minimum": -MOST_PRIORITY, "maximum": MOST_PRIORITY},
        }


def _leave_out_refused(schema: dict[str, Any]) -> None:
    """Drop the fields that melld refuses in every request."""
    for name in REFUSED:
        schema.get("properties", {}).pop(name, None)


def _name_the_encodings(components: dict[str, Any]) -> None:
    """Mark bytes within JSON as base64, for which pydantic uses a word of OpenAPI 3.0 that JSON Schema lacks."""
    for schema in containers(components):
        if isinstance(schema, dict) and (schema.get("type"), schema.get("format")) == ("string", "binary"):
            del schema["format"]
            schema["contentEncoding"] = "base64"


def _call(path: str, schemas: dict[tuple[str, str], Any]) -> dict[str, Any]:
    call = CALLS[path]
    content: dict[str, Any] = {"application/json": {"schema": schemas[path, "gives"]}}
    if call.streams:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no words for one event of many
    media_type = FORM if call.hears else JSON
    wanted_id = {"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"}
    return {
        "operationId": _name(path),
        "summary": call.summary,
        "parameters": [{"name": "X-Request-Id", "in": "header", "required": False, "schema": wanted_id}],
        "requestBody": {"required": True, "content": {media_type: {"schema": schemas[path, "takes"]}}},
        "responses": {
            "200": {"description": "Done, or the stream has started", "content": content},
            "4XX": _error("The request is invalid", call.dialect),
            "5XX": _error("Server error, or server busy: Retry-After says when to retry", call.dialect),
        },
    }


def _plain(path: str, method: str, plain: Plain, schemas: dict[tuple[str, str], Any]) -> dict[str, Any]:
    schema = schemas.get((path, method), {"type": "object" if plain.media_type == "application/json" else "string"})
    responses = {
        "200": {"description": plain.summary, "content": {plain.media_type: {"schema": schema}}},
        "4XX": _error("Not found, method not allowed, or missing key", Dialect.OPENAI),
    }
    if path == "/ready":
        responses["503"] = {"description": "Not ready", "content": responses["200"]["content"]}
    operation: dict[str, Any] = {"operationId": _name(path), "summary": plain.summary, "responses": responses}
    if method == "delete":
        operation["operationId"] += "_delete"
    for name in re.findall("{(.*)}", path):
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation | ({"security": []} if plain.open else {})


def _error(description: str, dialect: Dialect) -> dict[str, Any]:
    body = AnthropicErrorBody if dialect is Dialect.ANTHROPIC else ErrorBody
    reference = {"$ref": REFERENCE.format(model=body.__name__)}
    return {"description": description, "content": {"application/json": {"schema": reference}}}


def _name(path: str) -> str:
    return path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_") or "overview"
