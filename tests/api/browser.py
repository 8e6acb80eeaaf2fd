"""Drive a real headless browser: Chromium over its DevTools protocol.

Owns the process and the protocol; what is looked at is the tests' to say.  Every wait is for the page to say yes.
"""

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.patience import PATIENCE_S

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
)


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last_id = 0
        self.complaints: list[str] = []
        """What the browser's console says of errors: a script that failed, a policy that was broken."""

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a protocol command and return its result."""
        self._last_id += 1
        await self._socket.send_json({"id": self._last_id, "method": method, "params": parameters})
        while True:
            said = await self._socket.receive_json(timeout=PATIENCE_S)
            if said.get("id") == self._last_id:
                assert "error" not in said, said
                return dict(said["result"])
            self._hear(said)

    def _hear(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
            self.complaints.append(said["params"]["entry"]["text"])
        if said.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["params"]["exceptionDetails"]))

    async def open(self, url: str) -> None:
        """Open this URL."""
        await self.command("Page.navigate", url=url)

    async def evaluate(self, script: str) -> Any:
        """Evaluate an expression, awaiting promises."""
        done = await self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def wait_until(self, condition: str) -> None:
        """Return once the expression is true, checking after each change to the page."""
        script = f"""new Promise((done, fail) => {{
            const look = () => ({condition}) && (done(true), true);
            if (look()) return;
            const watch = new MutationObserver(() => look() && watch.disconnect());
            watch.observe(document, {{subtree: true, childList: true, attributes: true, characterData: true}});
            setTimeout(() => fail(new Error(document.body.innerText)), {PATIENCE_S * 1e3});
        }})"""
        await self.evaluate(script)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key in the focused element, as a keyboard user would."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}[key]
        held: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        await self.command("Input.dispatchKeyEvent", type="keyDown", **held, **({"text": text} if text else {}))
        await self.command("Input.dispatchKeyEvent", type="keyUp", **held)

    async def write(self, text: str) -> None:
        """Type this text."""
        await self.command("Input.insertText", text=text)

    async def screenshot(self, width: int, height: int, *, dark: bool = False) -> bytes:
        """Take a PNG screenshot of the settled page, at twice the size for sharpness."""
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme, still])
        await self.command("Emulation.setScrollbarsHidden", hidden=True)
        shot = await self.command("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@contextlib.contextmanager
def browser(*flags: str) -> Iterator[str]:
    """Start a browser with these extra flags; yield the address of its protocol.  Skip where none is installed."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    with tempfile.TemporaryDirectory(prefix="melld-browser-", ignore_cleanup_errors=True) as profile:
        words = [program, *QUIET, *flags, f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines = iter(process.stderr)
            reader = threading.Thread(target=lambda: deque(lines, 0))  # else the browser would wait for one
            try:
                address = next((line.split()[-1] for line in lines if "DevTools listening on" in line), "")
                assert address, "the browser ended before it listened"
                reader.start()
                yield address
            finally:
                process.terminate()
                if reader.is_alive():
                    reader.join(PATIENCE_S)


@contextlib.asynccontextmanager
async def tab_of(address: str) -> AsyncIterator[Tab]:
    """Yield an empty page of this browser that shares no cookies or storage with others."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
        owner = Tab(socket)
        context = await owner.command("Target.createBrowserContext", disposeOnDetach=True)
        made = await owner.command("Target.createTarget", url="about:blank", **context)
        page = f"{address.partition('/devtools/')[0]}/devtools/page/{made['targetId']}"
        async with session.ws_connect(page, max_msg_size=0) as socket_of_page:
            tab = Tab(socket_of_page)
            for domain in ("Page", "Runtime", "Log"):
                await tab.command(f"{domain}.enable")
            yield tab


@contextlib.asynccontextmanager
async def browser_tab(*flags: str) -> AsyncIterator[Tab]:
    """Yield an empty page in its own browser, started with these extra flags."""
    with browser(*flags) as address:
        async with tab_of(address) as tab:
            yield tab
