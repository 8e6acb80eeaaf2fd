"""The chat on the page at `/`: a visitor sees the answer stream and what the daemon does for it."""

from typing import Any

import pytest

from tests.api.browser import Tab
from tests.api.http_client import API_KEY
from tests.api.page import served
from tests.cli.plausible import STATUS
from tests.serve.daemon_process import DaemonProcess

HOSTILE = '<img src=x onerror="document.title=1">'
IS_OFFERED = "typeof at === 'function' && !at('chat').hidden && at('chat-model').value"
IS_DONE = "answering === null && document.querySelectorAll('.turn').length > 1"


def chunk(tokens: int, **delta: str) -> dict[str, Any]:
    """Return an event of a chat's stream."""
    return {"choices": [{"delta": delta}], "usage": {"completion_tokens": tokens}}


async def say(tab: Tab, text: str) -> None:
    """Write a message and send it, with the keyboard alone."""
    await tab.wait_until(IS_OFFERED)
    for _ in range(12):
        if await tab.evaluate("document.activeElement.id") == "chat-text":
            break
        await tab.press("Tab")
    assert await tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    await tab.write(text)
    await tab.press("Enter")


async def test_a_chat_s_request_is_shown_at_work_and_can_be_stopped(daemon: DaemonProcess, tab: Tab) -> None:
    """The answer streams, its request's bar stands out, and Escape frees its worker at once."""
    await tab.open(daemon.url)
    await tab.wait_until(IS_OFFERED)
    await tab.evaluate("at('chat-most').value = '4000'")
    await say(tab, "Hello")
    await tab.wait_until("document.querySelector('.bar .mine') && at('chat-where').textContent.includes('is on w')")
    assert await tab.evaluate("document.querySelectorAll('.bar .mine').length") == 1
    await tab.wait_until("document.querySelector('.turn:last-child').lastChild.textContent.includes('tokens/s')")
    await tab.press("Escape")
    await tab.wait_until(IS_DONE)
    told = await tab.evaluate("document.querySelector('.turn:last-child').lastChild.textContent")
    assert [word in told for word in ("first token after", "tokens/s", "tokens", "stopped")] == [True] * 4
    assert await tab.evaluate("turns.map((turn) => turn.role)") == ["user", "assistant"]
    assert await tab.evaluate("document.activeElement.id") == "chat-text"
    await tab.wait_until("!document.querySelector('.bar .mine')")


async def test_the_chat_uses_the_page_s_key(strict: DaemonProcess, tab: Tab) -> None:
    """The key that unlocks the page is used by the chat too, in this tab alone."""
    await tab.open(strict.url)
    await tab.wait_until("typeof at === 'function' && !at('key').hidden")
    await tab.evaluate(f"at('key-field').value = '{API_KEY}'; at('key').requestSubmit(); 1")
    await say(tab, "Hello")
    await tab.wait_until(IS_DONE)
    assert await tab.evaluate("turns.length") == 2
    assert await tab.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    tab.complaints = [said for said in tab.complaints if "401" not in said]


async def test_reasoning_is_folded_and_text_stays_text(tab: Tab) -> None:
    """Model output is shown verbatim; thoughts, by either name, can be unfolded and are not sent back."""
    thoughts = [chunk(1, reasoning=HOSTILE[:5]), chunk(2, reasoning_content=HOSTILE[5:])]
    events = [chunk(0, role="assistant", content=""), *thoughts, chunk(3, content=HOSTILE)]
    async with served(tab, STATUS, events) as url:
        await tab.open(url)
        await say(tab, HOSTILE)
        await tab.wait_until(IS_DONE)
        assert await tab.evaluate("[...at('chat-model').options].map((one) => one.value)") == ["chatter"]
        shown = "const last = document.querySelector('.turn:last-child'), folded = last.querySelector('details');"
        assert await tab.evaluate(f"{shown} [folded.hidden, folded.open]") == [False, False]
        assert await tab.evaluate("document.querySelector('.turn details').lastChild.data") == HOSTILE
        assert await tab.evaluate("turns.map((turn) => turn.content)") == [HOSTILE, HOSTILE]
        assert await tab.evaluate("document.querySelectorAll('main img').length") == 0


@pytest.mark.long
async def test_a_chat_fits_phones_and_desktops(tab: Tab) -> None:
    """No sideways scrolling, and no requests to third parties."""
    async with served(tab, STATUS, [chunk(1, content=300 * "long")]) as url:
        await tab.screenshot(390, 844)  # scrollbars are hidden from now on
        await tab.open(url)
        await say(tab, 100 * "long")
        await tab.wait_until(IS_DONE)
        for width in (390, 1400):
            await tab.screenshot(width, 844)
            assert await tab.evaluate("document.documentElement.scrollWidth") == width
        asked = await tab.evaluate("performance.getEntriesByType('resource').map((one) => one.name)")
        assert [one for one in asked if not one.startswith(("data:", url))] == []
        assert f"{url}v1/chat/completions" in asked


async def test_an_error_is_shown_and_the_message_is_kept(tab: Tab) -> None:
    """Nothing typed is lost: once the cause is fixed, Enter sends it again."""
    async with served(tab, STATUS, [{"error": {"message": HOSTILE}}]) as url:
        await tab.open(url)
        await say(tab, "Hello")
        await tab.wait_until(IS_DONE)
        assert await tab.evaluate("document.querySelector('.turn .failed').textContent") == HOSTILE
        assert await tab.evaluate("[at('chat-text').value, turns.length]") == ["Hello", 0]


@pytest.mark.long
async def test_shift_enter_inserts_a_line_break(tab: Tab) -> None:
    """A message may have several lines; a new chat clears all of it."""
    async with served(tab, STATUS, [chunk(1, content="Yes.")]) as url:
        await tab.open(url)
        await tab.wait_until(IS_OFFERED)
        await tab.evaluate("at('chat-text').focus()")
        await tab.write("one")
        await tab.press("Enter", shift=True)
        await say(tab, "two")
        await tab.wait_until(IS_DONE)
        assert await tab.evaluate("turns.map((turn) => turn.content)") == ["one\ntwo", "Yes."]
        await tab.evaluate("at('chat-new').click()")
        assert await tab.evaluate("[turns.length, document.querySelectorAll('.turn').length]") == [0, 0]
