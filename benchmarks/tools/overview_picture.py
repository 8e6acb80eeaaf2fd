"""Takes the picture of the page at `/` that the README shows: a real daemon under load, in headless Chromium.

    python -m benchmarks.tools.overview_picture docs/overview.png docs/overview-dark.png

Four workers on the CPU, one of them lent to another program; long and short prompts, so that size classes differ.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from melld.demo_model import make_demo_model
from tests.api.browser import browser_tab
from tests.serve.daemon_process import DaemonProcess

WORKER_TOKENS = 8192
# The prompts, as parts of a worker.
PARTS = (0.52, 0.35, 0.26, 0.2, 0.14, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.03, 0.02, 0.02, 0.02)
WIDTH, HEIGHT = 1100, 1000
# A picture is worth taking when a request is on its way, several hold memory, and a worker is lent.
WORTH_IT = (
    "document.querySelector('.bar .part.leaving') && document.querySelectorAll('.bar .part').length > 8"
    " && document.querySelector('.pill.lent')"
)


async def main() -> list[bytes]:
    """Load a daemon, wait for a move, take the pictures: light and dark."""
    with tempfile.TemporaryDirectory() as directory:
        model = prepare(Path(directory))
        flags = ["--device", "cpu:4", "--kv-bytes", f"{WORKER_TOKENS * 4096}", "--set", "idle.sleep_after_s=2"]
        with DaemonProcess(model, *flags) as daemon:
            daemon.wait_ready()
            async with aiohttp.ClientSession() as session, browser_tab() as tab:
                asked = [
                    asyncio.ensure_future(ask(session, daemon.url, part, index)) for index, part in enumerate(PARTS)
                ]
                borrowed = ["run", "--runtime-directory", str(daemon.runtime_directory), "--", "python", "train.py"]
                borrower = await asyncio.create_subprocess_exec(sys.executable, "-m", "melld", *borrowed, cwd=directory)
                await tab.open(daemon.url)
                await tab.wait_until(WORTH_IT)
                pictures = [await tab.screenshot(WIDTH, HEIGHT, dark=dark) for dark in (False, True)]
                borrower.terminate()
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
                return pictures


def prepare(directory: Path) -> Path:
    """Make the model, and the program that borrows a device."""
    make_demo_model(model := directory / "demo")
    (directory / "train.py").write_text("import time; time.sleep(600)")
    return model


async def ask(session: aiohttp.ClientSession, url: str, part: float, index: int) -> None:
    """Short answers to long questions end soon, and leave room for others to be pulled together."""
    while True:
        await asyncio.sleep(0.2 * index)
        body = {
            "model": "demo",
            "prompt": tokens(part, index),
            "max_tokens": 120 + 90 * (index % 5),
            "ignore_eos": True,
        }
        head = {"X-Request-Id": f"client-{index:02d}"}
        async with session.post(f"{url}/v1/completions", json=body, headers=head) as answer:
            await answer.read()


def tokens(part: float, index: int) -> Sequence[int]:
    """Return a prompt of so many tokens, unlike the others: they share no prefix."""
    return [10 + (index * 31 + place) % 200 for place in range(int(part * WORKER_TOKENS))]


if __name__ == "__main__":
    for name, picture in zip(sys.argv[1:], asyncio.run(main()), strict=False):
        Path(name).write_bytes(picture)
