"""The page at `/` shows the daemon's state only to those allowed to see it; nothing that a client sends runs in it."""

import asyncio
import html.parser
import re

import msgspec
import openai
import pytest

from melld.api.pages import overview_headers, overview_html
from melld.control.status import DaemonStatus, ModelState, ModelStatus
from melld.scheduler.policies.mell.classes import Limits
from tests.api.browser import Tab
from tests.api.http_client import API_KEY, request
from tests.api.page import served
from tests.cli.plausible import STATUS
from tests.serve.daemon_process import DaemonProcess

NO_KEY = {"Authorization": ""}
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'


class Elements(html.parser.HTMLParser):
    """Every element of the page with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_needs_no_key_and_reveals_nothing(strict: DaemonProcess) -> None:
    """Whoever opens the address sees where to enter a key, and not one fact about the daemon."""
    page = request(strict.url, "GET", "/", headers=NO_KEY)
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.body == overview_html(), "the same bytes for everybody"


def test_the_page_s_data_needs_the_key(strict: DaemonProcess) -> None:
    """Other users' request ids and loads are for those who may use the daemon."""
    assert request(strict.url, "GET", "/status", headers=NO_KEY).status == 401
    answer = request(strict.url, "GET", "/status")
    assert (answer.status, answer.headers["cache-control"]) == (200, "no-store")
    status = msgspec.json.decode(answer.body, type=DaemonStatus)
    assert (status.model, status.state) == ("demo", "ready")


def test_the_page_is_self_contained() -> None:
    """It works without a network, and tells no third party that it was opened."""
    text = overview_html().decode()
    elements = Elements()
    elements.feed(text)
    sources = [value for _, attributes in elements.found for name in ("src", "href") if (value := attributes.get(name))]
    assert [source for source in sources if not source.startswith("data:")] == []
    assert "@import" not in text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", text) == []


def test_the_page_has_no_inline_handlers_and_builds_no_markup() -> None:
    """Client text can only ever become text."""
    text = overview_html().decode()
    elements = Elements()
    elements.feed(text)
    names = {name for _, attributes in elements.found for name in attributes}
    assert {name for name in names if name.startswith("on") or name == "style"} == set()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert way not in text


def test_the_content_security_policy_pins_the_script_by_digest() -> None:
    """An injected script would not run."""
    policy = overview_headers()["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


async def test_a_running_request_appears_in_its_worker_s_bar(daemon: DaemonProcess, tab: Tab) -> None:
    """The picture shows the current state, in a real browser, under the page's own policy."""
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
        asking = asyncio.ensure_future(_ask_again_and_again(client))
        await tab.open(daemon.url)
        await tab.wait_until("document.querySelector('.bar .part[title*=to-be-seen]')")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await tab.wait_until("!document.querySelector('.part[title*=to-be-seen]')")
    assert await tab.evaluate("document.title") == "melld: demo"
    assert await tab.evaluate("document.querySelectorAll('.worker').length") == 2


async def _ask_again_and_again(client: openai.AsyncOpenAI) -> None:
    """Keep sending requests, so that there is always one to see."""
    while True:
        await client.completions.create(
            model="demo",
            prompt="Hello",
            max_tokens=2000,
            extra_headers={"X-Request-Id": "to-be-seen"},
            extra_body={"ignore_eos": True},
        )


async def test_the_page_asks_for_the_key_and_forgets_it(strict: DaemonProcess, tab: Tab) -> None:
    """The key is kept for the tab alone; a wrong one is asked for again."""
    await tab.open(strict.url)
    for key, then in (
        ("wrong", "at('key-text').textContent.includes('does not accept')"),
        (API_KEY, "!at('page').hidden"),
    ):
        await tab.wait_until("typeof at === 'function' && !at('key').hidden")
        await tab.evaluate(f"at('key-field').value = '{key}'; at('key').requestSubmit(); 1")
        await tab.wait_until(then)
    assert await tab.evaluate("document.querySelectorAll('.worker').length") == 1
    assert await tab.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    await tab.evaluate("at('forget').click(); 1")
    assert await tab.evaluate("[at('page').hidden, sessionStorage.length]") == [True, 0]
    tab.complaints = [said for said in tab.complaints if "401" not in said]


async def test_client_text_stays_text(tab: Tab) -> None:
    """An id, reason or model name that looks like markup is shown verbatim and never run."""
    workers = tuple(msgspec.structs.replace(worker, reason=HOSTILE, device_name=HOSTILE) for worker in STATUS.workers)
    requests = tuple(
        msgspec.structs.replace(one, request=f"{index}{HOSTILE}", moving_to="w1")
        for index, one in enumerate(STATUS.requests)
    )
    models = (ModelStatus(model=HOSTILE, names=(HOSTILE,), state=ModelState.LOADED),)
    status = msgspec.structs.replace(
        STATUS,
        model=HOSTILE,
        url=HOSTILE,
        warnings=(HOSTILE,),
        workers=workers,
        requests=requests,
        served=models,
    )
    async with served(tab, status) as url:
        await tab.open(url)
        await tab.wait_until("document.querySelectorAll('.worker').length === 3")
        assert await tab.evaluate("document.title") == f"melld: {HOSTILE}"
        assert await tab.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert await tab.evaluate("at('model').textContent") == HOSTILE


@pytest.mark.long
async def test_requests_are_coloured_by_the_scheduler_s_classes(tab: Tab) -> None:
    """What looks large on the page is large to the scheduler."""
    capacity_bytes = 1_000_003
    sizes = [capacity_bytes // part + more for part in (8, 4, 3, 2, 1) for more in (-1, 0, 1)]
    limits = Limits.of(capacity_bytes)
    async with served(tab, STATUS) as url:
        await tab.open(url)
        await tab.wait_until("document.querySelectorAll('.worker').length === 3")
        shown = await tab.evaluate(f"{sizes}.map((bytes) => classOf({{kv_bytes: bytes}}, {capacity_bytes}))")
    assert shown == [limits.class_of(size).name for size in sizes]


@pytest.mark.long
async def test_the_page_follows_the_browser_s_colour_scheme(tab: Tab) -> None:
    """Light by day, dark by night, by the browser's own setting."""
    async with served(tab, STATUS) as url:
        await tab.open(url)
        await tab.wait_until("document.querySelectorAll('.worker').length === 3")
        for dark, expected in ((False, "rgb(245, 246, 248)"), (True, "rgb(18, 22, 27)")):
            picture = await tab.screenshot(1100, 900, dark=dark)
            assert picture.startswith(b"\x89PNG")
            assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") == expected
