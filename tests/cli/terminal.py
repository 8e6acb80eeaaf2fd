"""A command on its own terminal: a pseudo-terminal with a size, keys to press and a screen to read."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType
from typing import Self

from tests.patience import PATIENCE_S

# Makes the terminal on standard input the controlling one, so that Ctrl-C reaches the command, and runs melld.
LAUNCH = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from melld.cli import main
sys.exit(main(sys.argv[1:]))
"""
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|[=>])")


class Terminal:
    """`melld WORDS...` on a terminal of this many columns and lines."""

    def __init__(self, *words: str, columns: int = 100, lines: int = 30, kind: str = "xterm-256color") -> None:
        self._screen, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
        hidden = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *words],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**environment, "TERM": kind},
            start_new_session=True,
        )
        os.close(inside)
        self.raw = ""

    @property
    def text(self) -> str:
        """Return all output so far, without colours and cursor movements."""
        return ESCAPES.sub("", self.raw).replace("\r\n", "\n")

    def press(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def read_until(self, words: str, deadline_s: float = PATIENCE_S) -> None:
        """Read on until `words` are on the screen."""
        end_s = time.monotonic() + deadline_s
        while words not in self.text:
            assert time.monotonic() < end_s, f"{words!r} did not come; there is:\n{self.text}"
            assert self._read_more(end_s), f"ended without {words!r}; there is:\n{self.text}"

    def exit_code(self, deadline_s: float = PATIENCE_S) -> int:
        """Read until the command ends."""
        end_s = time.monotonic() + deadline_s
        while self._read_more(end_s):
            assert time.monotonic() < end_s, f"it does not end; there is:\n{self.text}"
        return self.process.wait(timeout=deadline_s)

    def _read_more(self, end_s: float) -> bool:
        """Return True while the command has its terminal open."""
        if select.select([self._screen], [], [], max(0.0, end_s - time.monotonic()))[0]:
            try:
                self.raw += os.read(self._screen, 65_536).decode(errors="replace")
            except OSError:  # EIO: the other side is closed
                return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._screen)
