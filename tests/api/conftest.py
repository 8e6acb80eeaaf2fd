"""A daemon with an API key and tight limits, for tests that try to get past them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.api.browser import Tab, browser, tab_of
from tests.api.http_client import API_KEY, PAGE_ORIGIN
from tests.api.scripted import App
from tests.serve.daemon_process import DaemonProcess

LIMITS = {
    "header_timeout_s": 1.0,
    "body_timeout_s": 1.0,
    "slow_reader_s": 1.0,
    "max_body_bytes": 2_000_000,
    "max_concurrent_requests": 70,
    "max_headers": 100,
    "max_constraint_bytes": 1_000_000,
    "constraint_cpu_s": 1.0,
    "drain_s": 1.0,
    "min_priority": 0,
    "allowed_origins": f'["{PAGE_ORIGIN}"]',
}


@pytest.fixture(scope="package")
def strict(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One worker, an API key, short timeouts and few places."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# for tests\n{API_KEY}\n")
    flags = [flag for name, value in LIMITS.items() for flag in ("--set", f"server.{name}={value}")]
    with DaemonProcess(demo_model, "--device", "cpu:1", "--api-key-file", str(keys), *flags) as process:
        yield process.wait_ready()


@pytest.fixture(scope="package")
def app(demo_model: Path) -> Iterator[App]:
    """The API over models with one worker each and known tokens."""
    started = App(demo_model)
    yield started
    started.process.communicate("\n")


@pytest.fixture(scope="package")
def started_browser() -> Iterator[str]:
    """A browser for the pages of all tests."""
    with browser() as address:
        yield address


@pytest.fixture
async def tab(started_browser: str) -> AsyncIterator[Tab]:
    """A browser page that must end without console errors."""
    async with tab_of(started_browser) as opened:
        yield opened
        await opened.evaluate("1")
        assert opened.complaints == []
