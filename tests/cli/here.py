"""Run a `melld` command inside the tests' process: its output and exit code, as from a separate program.

A program takes a fifth of a second of processor to begin, most of what a short command takes.  Each command has a test
that does begin one.
"""

import contextlib
import io
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from melld.cli import main


def melld_here(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Return what `tests.forked.run_melld` gives for these words."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd or Path.cwd()),
        mock.patch.dict(os.environ, dict(env), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(words)
    return subprocess.CompletedProcess(["melld", *words], code, out.getvalue(), err.getvalue())
