"""Every command's output can be cut short by whoever reads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "check-config": ("check-config", "--quick", "--model", "MODEL"),
    "simulate": ("simulate", "--poisson", "0.5", "--lengths", "lognormal", "--seconds", "5"),
    "install-service": ("install-service", "--dry-run"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_leaves_is_no_error(words: tuple[str, ...], demo_model: Path) -> None:
    """`melld ... | head -n 1` shows a line, and no traceback under it."""
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [str(demo_model) if word == "MODEL" else word for word in words]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "melld", *arguments], stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr.decode()) == (0, "")
