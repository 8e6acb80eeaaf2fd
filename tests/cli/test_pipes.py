"""Every command's output can be cut short by whoever reads it, and need not arrive."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

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
    return subprocess.run([*program, *arguments], stdout=output, stderr=subprocess.PIPE, timeout=60, check=False)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_leaves_is_no_error(words: tuple[str, ...], demo_model: Path) -> None:
    """`melld ... | head -n 1` shows a line, and no traceback under it."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = run(MELLD, words, demo_model, pipe)
    assert (done.returncode, done.stderr.decode()) == (0, "")


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_told_in_a_line(words: tuple[str, ...], demo_model: Path) -> None:
    """`melld ... > FILE` on a full disk fails and says why, without a traceback."""
    with Path("/dev/full").open("wb") as full:
        done = run(MELLD, words, demo_model, full)
    told = done.stderr.decode()
    assert (done.returncode, told.count("\n")) == (1, 1)
    assert re.fullmatch(
        rf"melld {words[0]}: (cannot write the output:|\[Errno 28\]) No space left on device", told.strip()
    )


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_needs_no_output(words: tuple[str, ...], demo_model: Path) -> None:
    """`melld ... >&-`, as some service managers start it, does what it is for."""
    done = run(("sh", "-c", 'exec "$@" >&-', "sh", *MELLD), words, demo_model, None)
    assert (done.returncode, done.stderr.decode()) == (0, "")
