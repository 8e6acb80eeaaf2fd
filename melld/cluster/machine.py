"""A machine of the cluster as the daemon sees it: a host whose workers live behind one TLS connection.

Owns the numbers of its workers.  Never reads what a worker says.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from melld.cluster import envelopes as say
from melld.cluster.link import Link
from melld.engine.host.ports import Ear
from melld.engine.host.standstill import Reach, Standstill
from melld.engine.wire.frames import Buffer
from melld.engine.wire.spec import WorkerSpec
from melld.kvstore.worker_readings import WorkerReading

log = logging.getLogger("melld.cluster")


class Machine:
    """A machine, from its `Hello` to its loss.  A `Host`; to be used on the event loop.

    Calls `on_lost(machine, reason)` once when it is lost, before `end_children`.
    """

    def __init__(self, hello: say.Hello, link: Link, on_lost: Callable[["Machine", str], None]) -> None:
        self.name = hello.machine
        self.devices = hello.devices
        self.readings: dict[str, WorkerReading] = {}
        """The last, by worker."""
        self.why_lost: str | None = None
        self._link = link
        self._on_lost = on_lost
        self._children: dict[int, RemoteChild] = {}
        self._numbers = itertools.count(1)
        link.received, link.lost = self._received, self._lost

    def spawn(self, spec: WorkerSpec, ear: Ear) -> "RemoteChild":
        """See `Host.spawn`."""
        if self.why_lost is not None:
            raise OSError(f"machine {self.name} is lost: {self.why_lost}")
        number = next(self._numbers)
        child = self._children[number] = RemoteChild(number, ear, self._link)
        self._link.send(say.Spawn(number, spec))
        return child

    def dismiss(self) -> None:
        """Tell the agent to leave: its workers have ended, or end now."""
        self._link.send(say.Leave("the daemon has stopped"))
        self._link.close()

    def end_children(self) -> None:
        """Count every worker of a lost machine as ended."""
        children, self._children = self._children, {}
        for child in children.values():
            child.exited(f"machine {self.name} is lost: {self.why_lost}", from_outside=True)

    def _received(self, message: Any, payload: list[bytes]) -> None:
        match message:
            case say.Bytes(number) if number in self._children:
                for data in payload:
                    self._children[number].ear.received(data)
            case say.Forked(number, pid) if number in self._children:
                self._children[number].ear.forked(pid)
            case say.Printed(number, line) if number in self._children:
                self._children[number].ear.printed(line)
            case say.Seen(number, seen) if number in self._children:
                self._children[number].looked(seen)
            case say.Exited(number, reason, from_outside) if number in self._children:
                self._children.pop(number).exited(reason, from_outside)
            case say.Readings(readings):
                self.readings = readings
            case say.Leave(reason):
                self._link.end(reason)

    def _lost(self, reason: str) -> None:
        self.why_lost = reason
        log.log(logging.ERROR if self._children else logging.INFO, "machine %s is lost: %s", self.name, reason)
        self._on_lost(self, reason)
        self.end_children()


class RemoteChild:
    """A process of another machine.  A `Child`."""

    def __init__(self, number: int, ear: Ear, link: Link) -> None:
        self.ear = ear
        self._number = number
        self._link = link
        self._has_exited = False
        self._seen = Standstill()
        self._reach: Reach = "itself"
        self._is_looking = False

    def write(self, buffers: Sequence[Buffer]) -> None:
        """See `Child.write`."""
        if not self._has_exited:
            for piece in say.pieces(buffers):
                self._link.send(say.Bytes(self._number), piece)

    def hold(self, holds: bool) -> None:
        """See `Child.hold`: nothing is held, as all workers of its machine share the link."""

    def kill(self) -> None:
        """See `Child.kill`."""
        if not self._has_exited:
            self._link.send(say.Kill(self._number))

    def look(self, reach: Reach) -> Standstill:
        """See `Child.look`: ask the machine, and return its previous finding."""
        if not self._is_looking:
            if reach != self._reach:
                self._seen, self._reach = Standstill(), reach
            self._is_looking = True
            self._link.send(say.Look(self._number, reach))
        found = self._seen if reach == self._reach else Standstill()
        return msgspec.structs.replace(found, is_out_of_sight=self._link.is_silent)

    def looked(self, seen: Standstill) -> None:
        """Note what the machine found."""
        self._seen, self._is_looking = seen, False

    def exited(self, reason: str, from_outside: bool) -> None:
        """Note its end."""
        self._has_exited = True
        self.ear.exited(reason, from_outside)
