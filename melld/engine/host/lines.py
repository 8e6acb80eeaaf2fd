"""Reads what a process prints, line by line.

Owns the pipe that it prints to.
"""

import asyncio
import collections
import contextlib
import os
from collections.abc import Callable

MAX_LOG_LINES = 40
"""How many of a process's last lines are kept."""


class OutputLines(asyncio.Protocol):
    """Everything that a process prints, line by line, including its libraries and a dying interpreter."""

    def __init__(self, printed: Callable[[str], None]) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=MAX_LOG_LINES)
        self._printed = printed
        self._rest = b""

    def open(self) -> int:
        """Return the descriptor for the process to print to; the caller closes it once the process has it."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._pipe = os.fdopen(read_end, "rb", 0)
        loop = asyncio.get_running_loop()
        self._reading = loop.create_task(loop.connect_read_pipe(lambda: self, self._pipe), name="what a process prints")
        self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return write_end

    def data_received(self, data: bytes) -> None:
        """Split data into lines.  See `asyncio.Protocol`."""
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = self._rest[-4096:]
        for line in lines:
            if text := line.decode(errors="replace").strip():
                self.last.append(text)
                self._printed(text)

    def read_rest(self) -> None:
        """Read what is left after the process's end: its last line says why it ended."""
        with contextlib.suppress(OSError, ValueError):  # nothing more is there, or the pipe is closed
            while data := os.read(self._pipe.fileno(), 1 << 16):
                self.data_received(data)
        self.data_received(b"\n")

    def close(self) -> None:
        """Read no further, though processes may still hold the other end."""
        if self._reading.done() and not self._reading.cancelled() and self._reading.exception() is None:
            self._reading.result()[0].close()
        else:
            self._reading.cancel()
            self._pipe.close()
