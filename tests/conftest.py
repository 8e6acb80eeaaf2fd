"""What many tests share: the demo model, and one daemon with two CPU workers, started once."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from melld.demo_model import make_demo_model
from tests.serve.daemon_process import DaemonProcess

OTHER_NAME = "gpt-4o"
"""Beside `demo`, what clients of the shared daemon may call its model."""

# A shell without job control starts its background commands with SIGINT ignored, and every child would inherit that:
# a suite that runs there must test Ctrl-C all the same.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that `melld demo-model` makes."""
    directory = tmp_path_factory.mktemp("models") / "demo"
    make_demo_model(directory)
    return directory


@pytest.fixture(scope="session")
def daemon(demo_model: Path) -> Iterator[DaemonProcess]:
    """A daemon that serves the demo model on two CPU workers, both always in use.

    Tests that harm it start one of their own.
    """
    spread = ("--set", 'scheduler.policy="most-free"', "--set", "idle.sleep_after_s=inf")
    tools = ("--set", "model.vllm.enable_auto_tool_choice=true", "--set", 'model.vllm.tool_call_parser="hermes"')
    names = ("--set", f'model.name=["demo", "{OTHER_NAME}"]')
    with DaemonProcess(demo_model, "--device", "cpu:2", *spread, *tools, *names) as process:
        yield process.wait_ready()
