"""Writes the daemon's output and log in a thread, so that a blocked reader cannot stop the daemon.

Owns the two descriptors.  A terminal stopped with Ctrl-S, a paused pager and a full pipe make every write wait; a
reader that has gone makes it fail.

    any thread ──text──► queue ──thread──► standard output, standard error
"""

import io
import os
import queue
import select
import threading

MOST_WAITING = 10_000
"""Texts that may wait; more are dropped, and their number is told among those that are not."""
CLOSE_DEADLINE_S = 2.0


class Output:
    """The path to both descriptors, which keeps the order of writes."""

    def __init__(self, out: int | None, error: int | None) -> None:
        """Take the descriptors; None for one that was closed when the process began, whose number others may have."""
        self._waiting: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._dropped = 0
        self.out, self.error = _Stream(self, out), _Stream(self, error)
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    def put(self, descriptor: int | None, text: str) -> None:
        """Queue the text, unless too much is queued."""
        if descriptor is None:
            return
        if self._waiting.qsize() >= MOST_WAITING:
            self._dropped += 1
        else:
            self._waiting.put((descriptor, text))

    def say(self, line: str) -> None:
        """Print a line."""
        self.out.write(f"{line}\n")

    def close(self) -> None:
        """Write the rest, waiting a limited time for the reader."""
        self._waiting.put(None)
        self._thread.join(CLOSE_DEADLINE_S)

    def _write_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            _write(*waiting)
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                _write(waiting[0], f"melld: {dropped} lines were dropped because the output was not read\n")


class _Stream(io.TextIOBase):
    """A text stream that never waits and never fails."""

    def __init__(self, output: Output, descriptor: int | None) -> None:
        self._output = output
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        self._output.put(self._descriptor, text)
        return len(text)


def _write(descriptor: int, text: str) -> None:
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # somebody else who has it open wants no writes that wait
            select.select((), (descriptor,), ())
        except OSError:  # its reader has gone, or its disk is full: there is nobody to tell
            return
