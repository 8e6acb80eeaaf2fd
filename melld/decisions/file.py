"""The daemon's decision log on disk, written by a separate thread so that no request ever waits for the disk.

Owns the file and the thread.  Never decides what a record says (`recorder` does), and never delays serving: if the file
cannot be written, the log ends and one warning says so.

    driver ──► Recorder ──records of one event──► take ──every tenth of a second──► thread: JSON, write
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from melld.decisions.records import Record, encode

FLUSH_S = 0.1
MOST_BEHIND = 200_000
"""Most records that may wait for a slow disk: about a hundred megabytes."""
CLOSE_DEADLINE_S = 5.0


class DecisionLogFile:
    """Log of one daemon, once it is begun; what it is given before that waits in memory.

    `failed` is called on the event loop, at most once, with the reason if the log ends early.
    """

    def __init__(self, path: Path, header: Record, failed: Callable[[str], None]) -> None:
        self._path = path
        self._header = header
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._taken: list[Record] = []
        self._given = 0
        self._written = 0
        self._ended = False
        self._batches: queue.SimpleQueue[list[Record] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin the file; keep an earlier daemon's log as FILE.1."""
        path = self._path
        try:
            if path.is_file() and path.stat().st_size:
                path.replace(path.with_name(path.name + ".1"))
            file = path.open("wb")
        except OSError as error:
            self._end(f"{error.strerror}")
            return
        self._thread = threading.Thread(target=self._write, args=(file, self._header), name="decision log", daemon=True)
        self._thread.start()

    def take(self, records: Sequence[Record]) -> None:
        """Log the records of one event, within `FLUSH_S` and the time that the disk takes."""
        if self._ended:
            return
        if not self._taken:
            self._loop.call_later(FLUSH_S, self.flush)
        self._taken.extend(records)

    def flush(self) -> None:
        """Hand the collected events to the thread."""
        taken, self._taken = self._taken, []
        if not taken or self._ended:
            return
        self._given += len(taken)
        if self._given - self._written > MOST_BEHIND:
            self._end("the disk is too slow")
        else:
            self._batches.put(taken)

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        self._batches.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_DEADLINE_S)

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            self._taken = []
            self._failed(f"the decision log {self._path} ends here; serving continues: {why}")

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _write(self, file: IO[bytes], header: Record) -> None:
        lines = [encode(header)]
        try:
            with file:
                while True:
                    file.write(b"".join(lines))
                    file.flush()
                    batch = self._batches.get()
                    if batch is None:
                        return
                    lines = [encode(record) for record in batch]
                    self._written += len(batch)
        except OSError as error:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits for the reason
                self._loop.call_soon_threadsafe(self._end, f"{error.strerror}")
