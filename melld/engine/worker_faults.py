"""Faults on demand, for tests: a worker that dies, or stops, at a named point of a migration.

Owns the points' meeting with their faults.  Without `MELLD_FAULTS` in its environment a worker has none, and a point
costs one comparison.  With it, the variable names a directory: a file `WORKER.POINT.SIGNAL` in it (`w1.attached.KILL`)
is taken away, and its signal sent to this process, when the worker reaches the point: each file works once.
"""

import os
import signal
from pathlib import Path

VARIABLE = "MELLD_FAULTS"
POINTS = (
    "described",  # source: it has looked, and not said so
    "reserved",  # destination: room is taken, and not said so
    "warmed",  # destination: the blocks are computed, room is not taken yet
    "copying",  # destination: a pull is about to begin
    "copied",  # destination: it has ended, and this is not said
    "freezing",  # source: about to freeze
    "frozen",  # source: frozen, and not said so
    "attaching",  # destination: about to attach, its last blocks are there
    "attached",  # destination: attached, and not said so
    "releasing",  # source: committed, its blocks are still its own
    "thawing",  # source: rolled back, not yet going on
    "cancelling",  # destination: rolled back, its room not yet given back
    "resumed",  # any worker: a request goes on here by its tokens, and has not been stepped
    "step",  # any step of the engine
)
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}


class FaultPoints:
    """The points of one worker."""

    def __init__(self, directory: str | None, worker: str) -> None:
        self._directory = Path(directory) if directory else None
        self._worker = worker

    def reach(self, point: str) -> None:
        """Suffer the fault that waits at this point, if one does."""
        if self._directory is None:
            return
        for name, number in SIGNALS.items():
            try:
                (self._directory / f"{self._worker}.{point}.{name}").unlink()
            except FileNotFoundError:
                continue
            os.kill(os.getpid(), number)
