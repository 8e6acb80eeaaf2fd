"""What many tests share: the demo model, and one daemon with two CPU workers, started once."""

import functools
import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest
from _pytest.assertion import rewrite
from _pytest.assertion.rewrite import assertstate_key
from hypothesis import settings

from tests.effort import LONG, SHORT
from tests.families.every import make_model_of
from tests.forked import nursery
from tests.patience import TEST_S
from tests.serve.daemon_process import DaemonProcess
from tests.small_model import make_small_model

SHARING = ("migrate", "residency", "api", "faults", "decisions")
"""Folders whose tests share daemons, workers or logs: each in one process."""
OF_API = ("guards", "serving", "docs", "test_profile")
"""What shares the daemons of `api`: folders and a file."""
ALONE = ("test_suspension", "test_tensor_parallel", "test_audio", "test_images", "test_adapters", "test_states")
ALONE += ("test_damaged_copies", "test_tensor_parallel_kinds", "test_audio_in_chats")
"""Files of these folders that take long with daemons or workers of their own."""
FIRST = (*SHARING[:3], *OF_API[:3], SHARING[3], "serve", *SHARING[4:], "simulator", "slo", "cli", "worker", "tests")
"""What takes longest goes first, so that all processes end with short files."""
OTHER_NAME = "gpt-4o"
"""Beside `demo`, what clients of the shared daemon may call its model."""

# A shell without job control starts its background commands with SIGINT ignored, and every child would inherit that:
# a suite that runs there must test Ctrl-C all the same.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("PYTEST_TIMEOUT", str(TEST_S))  # of pytest-timeout


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long` is `make test-all`."""
    parser.addoption("--long", action="store_true", help="every example, and the tests that are marked long too")


def pytest_configure(config: pytest.Config) -> None:
    """Set the number of examples and start the nursery's imports before any test module is read.

    Those of the tests go by a quarter sooner while nobody collects what they leave.
    """
    gc.disable()
    settings.load_profile(LONG if config.getoption("--long") else SHORT)
    if getattr(config.option, "numprocesses", None):  # several workers share one
        nursery()
        rewrite_tests(config)


def rewrite_tests(config: pytest.Config) -> None:
    """Rewrite a fresh clone's assertions once, while the nursery imports, and not in each process."""
    if sys.dont_write_bytecode:
        return
    for path in Path(__file__).parent.rglob("test_*.py"):
        compiled = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, compiled) is None and rewrite.try_makedirs(compiled.parent):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[assertstate_key], code, source, compiled)


def pytest_collection_finish() -> None:
    """Freeze what the tests have imported, so that the garbage collector skips it.

    Torch's threads would wait for each other while other processes have the cores: one is quicker.
    """
    gc.freeze()
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Start the test processes in the nursery too, with torch, vLLM and melld imported."""
    for spec in specs:
        spec.python = shlex.join([sys.executable, str(Path(__file__).with_name("forked.py"))])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file, and those of a folder whose tests share daemons, in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByDaemon(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = PurePath(nodeid.split("::")[0])
            folder = path.parent.name
            if folder in OF_API or path.stem in OF_API:
                return "api"
            return folder if folder in SHARING and path.stem not in ALONE else str(path)

    return ByDaemon(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the long tests without `--long`."""
    items.sort(key=lambda item: FIRST.index(name) if (name := item.path.parent.name) in FIRST else len(FIRST))
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the kind that `melld demo-model` makes."""
    directory = tmp_path_factory.mktemp("models") / "demo"
    make_small_model(directory)
    return directory


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a family's tiny model on first use."""

    @functools.cache
    def made(name: str) -> Path:
        directory = tmp_path_factory.mktemp("families") / name
        make_model_of(name, directory)
        return directory

    return made


@pytest.fixture(scope="session")
def daemon(demo_model: Path) -> Iterator[DaemonProcess]:
    """A daemon that serves the demo model on two CPU workers, both always in use.

    Tests that harm it start one of their own.
    """
    spread = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
    spread += ("--set", "health.steady_after_s=0")  # a worker that died is used like the other at once
    names = ("--set", f'model.name=["demo", "{OTHER_NAME}"]')
    with DaemonProcess(demo_model, "--device", "cpu:2", *spread, *names, harmable=True) as process:
        yield process.wait_ready()
