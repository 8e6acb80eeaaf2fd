"""Faults on demand, for tests: a worker that dies, or stops, at a named point of a migration.

Owns the lookup of faults at points.  Without `MELLD_FAULTS` in its environment a worker has none, and a point
costs one comparison.  With it, the variable names a directory: a file `WORKER.POINT.SIGNAL` in it (`w1.attached.KILL`)
is removed, and its signal sent to this process, when the worker reaches the point: each file works once.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from melld.migrate.transports.transport import Link, Wait

VARIABLE = "MELLD_FAULTS"
POINTS = (
    "starting",  # any worker: it is about to load the model
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
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "ABRT": signal.SIGABRT}
PULLED = "pulled"
"""The point, on a copying thread, between the copy of a piece and its check, for the `DAMAGES`."""
DAMAGES = ("CORRUPT", "SHORT")


class FaultPoints:
    """The fault points of one worker."""

    def __init__(self, directory: str | None, worker: str) -> None:
        self._directory = Path(directory) if directory else None
        self._worker = worker

    def __bool__(self) -> bool:
        return self._directory is not None

    def reach(self, point: str) -> None:
        """Suffer the fault set for this point, if there is one."""
        if self._directory is None:
            return
        for name, number in SIGNALS.items():
            if self.take(point, name):
                os.kill(os.getpid(), number)

    def take(self, point: str, fault: str) -> bool:
        """Return True, once, if this fault is set for this point."""
        if self._directory is None:
            return False
        try:
            (self._directory / f"{self._worker}.{point}.{fault}").unlink()
        except FileNotFoundError:
            return False
        return True


class SpoiltLink:
    """A link (`transports.transport.Link`) whose copies arrive corrupted, or short, when the fault points say so."""

    def __init__(self, link: "Link", region: "torch.Tensor", faults: FaultPoints) -> None:
        """Wrap `link`; `region` is the bytes (uint8) of our allocation."""
        self.source = link.source
        self.destination = link.destination
        self._link = link
        self._region = region
        self._faults = faults

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> "Wait":
        """Copy, then flip a bit in the last block, or leave the last block out."""
        short = self._faults.take(PULLED, "SHORT")
        end = len(source_blocks) - short
        landed = self._link.begin(source_blocks[:end], destination_blocks[:end])
        landed()
        if self._faults.take(PULLED, "CORRUPT"):
            layout = self.destination
            self._region[layout.chunk_offsets[0] + destination_blocks[-1] * layout.block_stride_bytes] ^= 1
        return landed

    def tune(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        """As the link does."""
        self._link.tune(source_blocks, destination_blocks)

    def checksum(self, side: str, blocks: Sequence[int]) -> int:
        """As the link does."""
        return self._link.checksum(side, blocks)

    def close(self) -> None:
        """As the link does."""
        self._link.close()
