"""What a newcomer reads when the daemon is ready."""

import shlex
from pathlib import Path

import pytest

from melld.cli import main
from melld.daemon_open import ready_text


def test_the_status_command_that_is_told_finds_this_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pasted as it stands it asks the daemon that printed it, also one with a runtime directory of its own."""
    directory = str(tmp_path / "of my own")
    line = ready_text("http://127.0.0.1:1", "demo", False, True, directory).splitlines()[-1]
    command = shlex.split(line.removesuffix("\n"))[2:]
    command.remove("--watch")
    assert main(command) == 3
    assert directory in capsys.readouterr().err


def test_without_a_directory_of_its_own_the_command_is_short() -> None:
    """Most have one daemon."""
    assert ready_text("http://127.0.0.1:1", "demo", False, True, None).rstrip().endswith("status --watch")
