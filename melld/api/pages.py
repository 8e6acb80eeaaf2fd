"""The endpoints that need no engine: health, readiness, versions, metrics, models, status and the overview page."""

import asyncio
import base64
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from vllm import __version__ as vllm_version

from melld.api.answers import JSON, Refusal
from melld.api.keys import Keys
from melld.api.models import AskedModel, cards
from melld.api.openapi import PLAIN, openapi_document
from melld.api.stored_responses import StoredResponses
from melld.config_server import ServerConfig
from melld.control.status import DaemonStatus

# Answers that name requests must not be cached.
NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@functools.cache
def overview_html() -> bytes:
    """Return the page, with the files that it names in comments."""
    folder = files("melld.api")
    page = folder.joinpath("overview.html").read_bytes()
    return re.sub(rb"/\* (chat\.\w+) \*/\n", lambda name: folder.joinpath(name[1].decode()).read_bytes(), page)


@functools.cache
def overview_headers() -> dict[str, str]:
    """Return the page's headers: the policy names the page's one script and one style by their digests."""
    policy = (
        "default-src 'none'",
        f"script-src {_source('script')}",
        f"style-src {_source('style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    kind = {"Content-Type": "text/html; charset=utf-8", "Referrer-Policy": "no-referrer"}
    return NO_STORE | kind | {"Content-Security-Policy": "; ".join(policy)}


def _source(element: str) -> str:
    """Return the digest of the element's text, as a browser computes it."""
    found = re.findall(rb"<%b>(.*?)</%b>" % (element.encode(), element.encode()), overview_html(), re.DOTALL)
    assert len(found) == 1, f"the page has one {element}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[0]).digest()).decode()}'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiContext:
    """The daemon, as the API sees it."""

    models: Sequence[AskedModel]
    """All models; the first answers calls that name none."""
    config: Callable[[], ServerConfig]
    """The present configuration: a reload may change it."""
    keys: Callable[[], Keys]
    why_not_ready: Callable[[], str | None]
    """Says in a few words why no request would be served now; None if it would."""
    why_closed: Callable[[], str | None]
    """Says why no call is admitted, not even to wait; None if calls are."""
    status: Callable[[], DaemonStatus]
    stored: StoredResponses
    registry: CollectorRegistry
    """The metrics of /metrics, to which the API adds its own."""
    troubled: Callable[[], Sequence[str]] = tuple
    """Names the daemon's tasks that have failed of late."""


async def health(_daemon: ApiContext, _rest: str) -> web.Response:
    """Answer while the daemon's event loop runs."""
    return _json(b'{"status": "ok"}')


async def ready(daemon: ApiContext, _rest: str) -> web.Response:
    """Answer 200 if requests are served, else 503 with the reason.

    A daemon with a task that has failed serves, and stays ready: without it its clients would lose more.
    """
    reason = daemon.why_not_ready()
    if reason is None:
        degraded = ", ".join(daemon.troubled())
        why = {"reason": f"degraded: a task failed and is being restarted: {degraded}"} if degraded else {}
        return _json(json.dumps({"status": "ready", **why}).encode())
    said = json.dumps({"status": "not ready", "reason": reason}).encode()
    return _json(said, status=503, headers={"Retry-After": "1"})


async def versions(_daemon: ApiContext, _rest: str) -> web.Response:
    """Return the versions of melld and vLLM."""
    return _json(json.dumps({"version": version("melld"), "vllm": vllm_version}).encode())


async def metrics(daemon: ApiContext, _rest: str) -> web.Response:
    """Return vLLM's metrics for each worker, and melld's, in the Prometheus text format.

    They are of one moment.  Written all at once, those of 32 workers would hold the event loop for 40 ms.
    """
    pieces = []
    for family in list(daemon.registry.collect()):
        pieces.append(generate_latest(_Collected(family)))
        await asyncio.sleep(0)
    return web.Response(body=b"".join(pieces), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def models(daemon: ApiContext, name: str) -> web.Response:
    """Return the list of models, or the one called `name`."""
    found = await cards(daemon.models)
    if not name:
        return _json(msgspec.json.encode({"object": "list", "data": found}))
    for card in found:
        if card["id"] == name:
            return _json(msgspec.json.encode(card))
    raise Refusal(404, f"The model `{name[:200]}` does not exist.", code="model_not_found", param="model")


async def overview(_daemon: ApiContext, _rest: str) -> web.Response:
    """Return the page for people."""
    return web.Response(body=overview_html(), headers=overview_headers())


async def status(daemon: ApiContext, _rest: str) -> web.Response:
    """Return what `melld status --json` prints."""
    return _json(msgspec.json.encode(daemon.status()), headers=NO_STORE)


async def openapi(_daemon: ApiContext, _rest: str) -> web.Response:
    """Return the description of this API.  It is made once, in a thread, because that takes most of a second."""
    return _json(await asyncio.to_thread(openapi_document))


PAGES: dict[str, Callable[[ApiContext, str], Awaitable[web.Response]]] = {
    "/": overview,
    "/status": status,
    "/openapi.json": openapi,
    "/health": health,
    "/ready": ready,
    "/version": versions,
    "/metrics": metrics,
    "/v1/models": models,
}
# The page itself holds nothing: it shows /status, for which it asks its reader for a key.
WITHOUT_KEY = frozenset(path for (path, _), plain in PLAIN.items() if plain.open)


class _Collected(Collector):
    """A family of metrics that has been collected."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def _json(body: bytes, **rest: Any) -> web.Response:
    return web.Response(body=body, content_type=JSON, **rest)
