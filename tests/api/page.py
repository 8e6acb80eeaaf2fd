"""The daemon's page as it is served, fed with answers that no test daemon would give."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from melld.api.pages import overview_headers, overview_html
from melld.control.status import DaemonStatus
from tests.api.browser import Tab

MODELS = [{"id": "embedder", "capabilities": ["embed"]}, {"id": "chatter", "capabilities": ["completion"]}]


@contextlib.asynccontextmanager
async def served(tab: Tab, status: DaemonStatus, events: Sequence[dict[str, Any]] = ()) -> AsyncIterator[str]:
    """Yield the page's URL over this status; chats there are answered with these events.

    The tab leaves it before its server ends, of which it would complain.
    """

    async def page(_request: web.Request) -> web.Response:
        return web.Response(body=overview_html(), headers=overview_headers())

    async def state(_request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(status), content_type="application/json")

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": MODELS})

    async def answer(_request: web.Request) -> web.Response:
        told = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=told + "data: [DONE]\n\n", headers={"x-request-id": "call"})

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_get("/status", state)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield str(runner.addresses[0][1]).join(("http://127.0.0.1:", "/"))
        await tab.open("about:blank")
    finally:
        await runner.cleanup()
