"""What a machine does for the daemon: start processes, carry their wires, and report how they end.

The interfaces only: `local` has this machine's, `melld.cluster` those of other machines.
"""

from collections.abc import Sequence
from typing import Protocol

from melld.engine.host.standstill import Reach, Standstill
from melld.engine.wire.frames import Buffer
from melld.engine.wire.spec import WorkerSpec


class Ear(Protocol):
    """Listens to one process, on the event loop; nothing comes after `exited`."""

    def forked(self, pid: int) -> None:
        """Note that the process exists.  `pid`: on its own machine."""

    def received(self, data: bytes) -> None:
        """Take the next bytes of its wire."""

    def printed(self, line: str) -> None:
        """Take a line of its output."""

    def exited(self, reason: str, from_outside: bool) -> None:
        """Handle its exit, with a one-line reason; `from_outside`: none of its requests is to blame (`fate`)."""


class Child(Protocol):
    """A requested process, on any machine."""

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Write to its wire; drop writes once it has exited."""

    def hold(self, holds: bool) -> None:
        """Pause reading from its wire while `holds`, if its host can."""

    def kill(self) -> None:
        """Kill it, even if it is stopped or not started yet; `Ear.exited` follows."""

    def look(self, reach: Reach) -> Standstill:
        """Check its progress; call at regular intervals."""


class Host(Protocol):
    """A machine that starts workers."""

    def spawn(self, spec: WorkerSpec, ear: Ear) -> Child:
        """Start a worker and return at once; `Ear.exited` always follows.

        Raises:
            OSError: there are no descriptors or no memory for it now.
        """
