"""What `multiprocessing` calls in a process forked by the template, and the descriptors sent there.

Owns nothing.  What the process becomes is in `melld.engine.worker`, which is named here and not imported.
"""

import importlib
from multiprocessing import reduction
from typing import Any

from melld.engine.wire.spec import Program


class Descriptor:
    """A descriptor among a process's arguments; it arrives as that process's own number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> int:
    return int(sent.detach())


def begin(program: Program, spec_bytes: bytes, descriptors: list[int]) -> None:
    """Become `program`."""
    importlib.import_module("melld.engine.worker.forking").begin(program, spec_bytes, *descriptors)
