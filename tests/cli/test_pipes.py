"""Command output may be cut short by its reader, discarded, or short of letters."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
import pytest

from tests.cli.plausible import STATUS
from tests.control.control_daemon import ControlDaemon, Operated

COMMANDS = {
    "check-config": ("check-config", "--quick", "--model", "MODEL"),
    "simulate": ("simulate", "--poisson", "0.5", "--lengths", "lognormal", "--seconds", "5"),
    "install-service": ("install-service", "--dry-run"),
}
MELLD = (sys.executable, "-m", "melld")


def run(
    program: Sequence[str], words: Sequence[str], model: Path, output: IO[bytes] | None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command, with the model in place of MODEL."""
    arguments = [str(model) if word == "MODEL" else word for word in words]
    return subprocess.run([*program, *arguments], stdout=output, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_leaves_is_no_error(words: tuple[str, ...], demo_model: Path) -> None:
    """`melld ... | head -n 1` shows a line, and no traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = run(MELLD, words, demo_model, pipe)
    assert (done.returncode, done.stderr.decode()) == (0, "")


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_reported_in_one_line(words: tuple[str, ...], demo_model: Path) -> None:
    """`melld ... > FILE` on a full disk fails and says why, without a traceback."""
    with Path("/dev/full").open("wb") as full:
        done = run(MELLD, words, demo_model, full)
    told = done.stderr.decode()
    assert (done.returncode, told.count("\n")) == (1, 1)
    assert re.fullmatch(
        rf"melld {words[0]}: (cannot write the output:|\[Errno 28\]) No space left on device", told.strip()
    )


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_works_without_stdout(words: tuple[str, ...], demo_model: Path) -> None:
    """`melld ... >&-`, as some service managers start it, still does its job."""
    done = run(("sh", "-c", 'exec "$@" >&-', "sh", *MELLD), words, demo_model, None)
    assert (done.returncode, done.stderr.decode()) == (0, "")


CLOSED = """
import socket, sys
from melld.cli import main
main(sys.argv[1:])
sys.exit(socket.socket().fileno())
"""


def test_closed_standard_descriptors_are_never_a_socket(demo_model: Path) -> None:
    """`melld serve <&-`: libuv aborts the process as it closes a socket with a number below 3."""
    program = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED)
    assert run(program, COMMANDS["check-config"], demo_model, None).returncode >= 3


ASCII = os.environ | {"PYTHONIOENCODING": "ascii"}


def test_characters_that_a_terminal_lacks_are_escaped(demo_model: Path) -> None:
    """A model's name may not be ASCII while a minimal container's terminal is."""
    words = (*MELLD, "check-config", "--quick", "--model", str(demo_model), "--name", "модель")
    done = subprocess.run(words, env=ASCII, capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert rb'name = "\u043c\u043e' in done.stdout


def test_json_is_utf_8_whatever_the_terminal() -> None:
    """A script that reads it needs no locale."""
    named = msgspec.structs.replace(STATUS, warnings=("modèle ☃",))
    with tempfile.TemporaryDirectory(prefix="melld-") as parent, ControlDaemon(Path(parent) / "run", Operated(named)):
        words = (*MELLD, "status", "--json", "--runtime-directory", f"{parent}/run")
        done = subprocess.run(words, env=ASCII, capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert json.loads(done.stdout)["warnings"] == ["modèle ☃"]
