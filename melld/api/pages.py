"""The endpoints that need no engine: what is served, whether it lives, what it does, and its metrics."""

import asyncio
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.datastructures import State
from vllm import __version__ as vllm_version

from melld.api.answers import Refusal
from melld.api.openapi import openapi_document
from melld.api.overview import CONTENT_TYPE, NO_STORE, overview_headers, overview_html
from melld.control.status import DaemonStatus

JSON = "application/json"


class Facts(Protocol):
    """What the pages show."""

    @property
    def state(self) -> State:
        """The serving classes of vLLM."""

    @property
    def registry(self) -> CollectorRegistry:
        """The metrics."""

    def status(self) -> DaemonStatus:
        """The daemon as it is now."""

    def why_not_ready(self) -> str | None:
        """The reason, in a word; None when ready."""


class Page(msgspec.Struct, frozen=True):
    """A whole response."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = {}


async def health(_facts: Facts, _rest: str) -> Page:
    """Liveness: the daemon's loop turns."""
    return _json({"status": "ok"})


async def ready(facts: Facts, _rest: str) -> Page:
    """Readiness: 503 with the reason until requests can be served, and while draining."""
    reason = facts.why_not_ready()
    if reason is None:
        return _json({"status": "ready"})
    return _json({"status": "not ready", "reason": reason}, 503, {"Retry-After": "1"})


async def versions(_facts: Facts, _rest: str) -> Page:
    """Of melld, and of the engine underneath."""
    return _json({"version": version("melld"), "vllm": vllm_version})


async def metrics(facts: Facts, _rest: str) -> Page:
    """Prometheus' text format: vLLM's own metrics for each worker, and melld's."""
    return Page(generate_latest(facts.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def models(facts: Facts, name: str) -> Page:
    """The list of models, or the one called `name`."""
    found = await facts.state.openai_serving_models.show_available_models()
    if not name:
        return Page(found.model_dump_json().encode())
    for model in found.data:
        if model.id == name:
            return Page(model.model_dump_json().encode())
    raise Refusal(404, f"The model `{name[:200]}` does not exist.", code="model_not_found", param="model")


async def overview(_facts: Facts, _rest: str) -> Page:
    """The page for people."""
    return Page(overview_html(), content_type=CONTENT_TYPE, headers=overview_headers())


async def status(facts: Facts, _rest: str) -> Page:
    """What `melld status --json` prints."""
    return Page(msgspec.json.encode(facts.status()), headers=NO_STORE)


async def openapi(_facts: Facts, _rest: str) -> Page:
    """The description of this API; made once, beside the loop, for it takes a good part of a second."""
    return Page(await asyncio.to_thread(openapi_document))


PAGES: dict[str, Callable[[Facts, str], Any]] = {
    "/": overview,
    "/status": status,
    "/openapi.json": openapi,
    "/health": health,
    "/ready": ready,
    "/version": versions,
    "/metrics": metrics,
    "/v1/models": models,
}
# The page itself tells nothing: what it shows comes from /status, for which it asks its reader for a key.
WITHOUT_KEY = frozenset({"/", "/health", "/ready"})


def _json(fields: dict[str, str], status: int = 200, headers: dict[str, str] | None = None) -> Page:
    return Page(json.dumps(fields).encode(), status, headers=headers or {})
