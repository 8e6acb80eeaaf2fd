"""CORS: pages whose origin the operator lists may call the API; for all others nothing changes."""

import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from melld.api.answers import Refusal
from melld.api.app import start_api
from melld.api.connections.origins import answer_head, preflight_head
from melld.api.connections.reach import check_sender_of_form
from melld.config_server import ServerConfig
from melld.config_text import parse_config
from melld.config_values import origin_in
from melld.errors import ConfigError
from tests.api.browser import Tab, browser_tab
from tests.api.contexts import context_of
from tests.api.http_client import API_KEY, CHAT, PAGE_ORIGIN, chat, request
from tests.serve.daemon_process import DaemonProcess

OTHER_ORIGIN = "http://evil.example"
PREFLIGHT = {"Origin": PAGE_ORIGIN, "Access-Control-Request-Method": "POST", "Authorization": ""}
FROM_PAGE = {"Origin": PAGE_ORIGIN}
NONE = ServerConfig()
ONE = ServerConfig(allowed_origins=(PAGE_ORIGIN,))
ALL = ServerConfig(allowed_origins=("*",))


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/responses/resp_1", "/no/such/path"])
def test_a_preflight_needs_no_key(strict: DaemonProcess, path: str) -> None:
    """Preflights carry none; the call that follows needs one, and its page can read what is wrong with the path."""
    asked = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    answer = request(strict.url, "OPTIONS", path, headers=PREFLIGHT | asked)
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == PAGE_ORIGIN
    assert answer.headers["access-control-allow-headers"] == asked["Access-Control-Request-Headers"]
    assert {"GET", "POST", "DELETE"} < set(answer.headers["access-control-allow-methods"].split(", "))
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    ("method", "path", "body", "head", "status"),
    [
        ("GET", "/v1/models", None, {}, 200),
        ("GET", "/", None, {}, 200),
        ("POST", CHAT, chat(), {}, 200),
        ("POST", CHAT, chat(stream=True), {}, 200),
        ("POST", CHAT, {"messages": 3}, {}, 400),
        ("POST", CHAT, chat(), {"Authorization": "Bearer wrong"}, 401),
        ("GET", "/no/such/path", None, {}, 404),
        ("GET", CHAT, None, {}, 405),
        ("OPTIONS", CHAT, None, {}, 405),
        ("POST", CHAT, b" " * 2_000_001, {}, 413),
        ("POST", CHAT, b"{}", {"Content-Type": "text/plain"}, 415),
    ],
)
def test_an_allowed_page_can_read_every_answer(
    strict: DaemonProcess, method: str, path: str, body: object, head: dict[str, str], status: int
) -> None:
    """An error that a page may not read is "Failed to fetch" to its user.  Others can read none."""
    answer = request(strict.url, method, path, body, FROM_PAGE | head)
    assert answer.status == status
    assert answer.headers["access-control-allow-origin"] == PAGE_ORIGIN
    assert (answer.headers["vary"], "x-request-id" in answer.headers) == ("Origin", True)
    other = request(strict.url, method, path, body, {"Origin": OTHER_ORIGIN} | head)
    assert [name for name in other.headers if name.startswith("access-control")] == []
    assert (other.status, other.headers["vary"]) == (status, "Origin")


def test_a_page_that_is_not_allowed_gets_no_preflight(strict: DaemonProcess, daemon: DaemonProcess) -> None:
    """Its browser then sends no call at all; by default no other page is allowed."""
    for url, origin in ((strict.url, OTHER_ORIGIN), (daemon.url, PAGE_ORIGIN)):
        answer = request(url, "OPTIONS", CHAT, headers=PREFLIGHT | {"Origin": origin})
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert [name for name in answer.headers if name.startswith("access-control")] == []


async def test_a_page_learns_when_to_retry() -> None:
    """A full or draining daemon says so to pages as well; a preflight takes no place."""
    config = ServerConfig(allowed_origins=(PAGE_ORIGIN,), max_concurrent_requests=1)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}{CHAT}"
    async with (
        start_api(dataclasses.replace(context_of([]), config=lambda: config), [listener]) as (admission, _),
        httpx.AsyncClient() as client,
    ):
        with admission.call():
            full = await client.post(url, json=chat(), headers=FROM_PAGE)
        admission.begin_drain()
        closed = await client.post(url, json=chat(), headers=FROM_PAGE)
        asked = await client.options(url, headers=PREFLIGHT)
    assert [answer.status_code for answer in (full, closed, asked)] == [429, 503, 204]
    for answer in (full, closed):
        assert answer.headers["access-control-allow-origin"] == PAGE_ORIGIN
        assert answer.headers["retry-after"]
        assert "retry-after" in answer.headers["access-control-expose-headers"]


def test_the_operator_s_lists_are_sent_to_browsers() -> None:
    """As with vLLM's options; JSON and a key header always need a preflight."""
    config = ServerConfig(allowed_origins=(PAGE_ORIGIN,), allowed_methods=("POST",), allowed_headers=("X-Mine",))
    head = preflight_head("OPTIONS", PREFLIGHT, config)
    assert head is not None
    assert head["Access-Control-Allow-Methods"] == "POST"
    assert head["Access-Control-Allow-Headers"] == "Content-Type, X-Mine"
    assert "Access-Control-Allow-Credentials" not in answer_head(FROM_PAGE, config)
    with_cookies = ServerConfig(allowed_origins=(PAGE_ORIGIN,), allow_credentials=True)
    assert answer_head(FROM_PAGE, with_cookies)["Access-Control-Allow-Credentials"] == "true"
    assert answer_head(FROM_PAGE, ALL)["Access-Control-Allow-Origin"] == "*"


@given(st.text())
def test_a_requested_header_is_echoed_only_if_it_can_be_sent(asked: str) -> None:
    """Clients control the header; one that cannot be sent would end in a 500."""
    head = preflight_head("OPTIONS", PREFLIGHT | {"Access-Control-Request-Headers": asked}, ALL)
    assert head is not None
    assert all(value.isascii() and value.isprintable() for value in head.values())


@given(st.text() | st.just(PAGE_ORIGIN), st.booleans())
def test_only_the_exact_origin_is_allowed(origin: str, asks: bool) -> None:
    """A longer name, another scheme or another port is a different origin."""
    headers = (PREFLIGHT if asks else FROM_PAGE) | {"Origin": origin}
    assert ("Access-Control-Allow-Origin" in answer_head(headers, ONE)) == (origin == PAGE_ORIGIN)
    assert (preflight_head("OPTIONS", headers, ONE) is not None) == (asks and origin == PAGE_ORIGIN)
    assert preflight_head("POST", headers, ONE) is None
    assert (answer_head(headers, NONE), preflight_head("OPTIONS", headers, NONE)) == ({}, None)


def test_a_form_needs_a_key_or_an_allowed_page() -> None:
    """Browsers send forms without a preflight."""
    check_sender_of_form(FROM_PAGE, ONE)
    check_sender_of_form({}, NONE)
    for config in (NONE, ONE):
        with pytest.raises(Refusal):
            check_sender_of_form({"Origin": OTHER_ORIGIN}, config)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("https://a.example/", "https://a.example"),
        ("https://a.example/chat?x=1", "https://a.example"),
        ("https://a.example:443", "https://a.example"),
        ("HTTP://A.Example:8080", "http://a.example:8080"),
        ("ftp://a.example", None),
        ("a.example", None),
        ("null", None),
        ("http://a.example:80808", None),
        ("https://*.a.example", None),
        ("https://user@a.example", None),
        ("", None),
    ],
)
def test_an_impossible_origin_is_refused_with_a_suggestion(given: str, meant: str | None) -> None:
    """It would silently allow nobody."""
    with pytest.raises(ConfigError) as refused:
        parse_config("", "melld.toml", {"model.path": "m", "server.allowed_origins": [PAGE_ORIGIN, given]})
    assert origin_in(given) == meant
    assert f'such as "{meant or "https://chat.example.org"}", not {json.dumps(given)}' in str(refused.value)


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://[::1]:8080", "app://obsidian.md", "tauri://localhost"]
)
def test_pages_apps_and_extensions_have_origins(origin: str) -> None:
    """Anything that calls from a browser engine can be listed."""
    config = parse_config("", "melld.toml", {"model.path": "m", "server.allowed_origins": origin})
    assert config.server.allowed_origins == (origin,)


async def test_a_page_in_a_browser_streams_and_reads_errors(strict: DaemonProcess) -> None:
    """As users meet it: two pages in a real browser, one of which may call."""
    async with _a_site() as port, browser_tab(f"--host-resolver-rules=MAP *.example 127.0.0.1:{port}") as tab:
        answers = await _calls(tab, PAGE_ORIGIN, strict.url)
        assert [status for status, *_ in answers] == [200, 401, 404]
        assert all(request_id for _, request_id, _ in answers)
        assert answers[0][2].endswith("data: [DONE]\n\n")
        assert "did you mean" in answers[2][2]
        assert await _calls(tab, OTHER_ORIGIN, strict.url) == ["Failed to fetch"] * 3


async def _calls(tab: Tab, origin: str, url: str) -> list[tuple[int, str, str]]:
    """Return what a page there can read of a stream and of answers to a wrong key and a wrong path."""
    await tab.open(origin)
    await tab.wait_until("location.protocol === 'http:'")
    body = json.dumps(chat(stream=True))
    calls = [(CHAT, API_KEY), (CHAT, "wrong"), ("/chat/completions", API_KEY)]
    script = f"""Promise.all({json.dumps(calls)}.map(([path, key]) => fetch({url!r} + path, {{method: "POST",
        headers: {{"Content-Type": "application/json", Authorization: "Bearer " + key}}, body: {body!r}}})
        .then(async (answer) => [answer.status, answer.headers.get("x-request-id"), await answer.text()])
        .catch((error) => error.message)))"""
    found: list[tuple[int, str, str]] = await tab.evaluate(script)
    return found


@contextlib.asynccontextmanager
async def _a_site() -> AsyncIterator[int]:
    """Serve an empty page under every name; return its port."""

    async def page(_request: web.BaseRequest) -> web.Response:
        return web.Response(text="<!doctype html><title>a page</title>", content_type="text/html")

    runner = web.ServerRunner(web.Server(page))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
