"""Returns a stopped worker's devices to Ray, and requests devices before it restarts (`return_idle`).

Owns when: a worker that is started again soon, as after a death, keeps its devices.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from melld.cluster.machine import Machine, NoSeat
from melld.engine.host.ports import Child, Ear
from melld.engine.host.standstill import Reach, Standstill
from melld.engine.wire.frames import Buffer
from melld.engine.wire.spec import WorkerSpec

RETURN_S = 5.0
"""How long after its end a worker's devices are kept for it."""


class SeatedHost:
    """The host of one worker: its machine, and the seats of the worker's devices there.  A `Host`."""

    def __init__(self, machine: Machine, seats: Sequence[int]) -> None:
        self._machine = machine
        self._made_for = {seat: machine.devices[seat].uuid for seat in seats}
        """The devices that the worker's specification names, by seat."""
        self._returning: asyncio.TimerHandle | None = None
        self._latest: SeatedChild | None = None

    def spawn(self, spec: WorkerSpec, ear: Ear) -> "SeatedChild":
        """See `Host.spawn`."""
        if self._returning is not None:
            self._returning.cancel()
        child = self._latest = SeatedChild(ear, self._ended)
        if self._made_for.keys() <= self._machine.devices.keys():
            child.started(self._machine.spawn(self._seated(spec), child))
        else:
            child.wait(self._take(spec, child))
        return child

    def _ended(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
        self._returning = asyncio.get_running_loop().call_later(RETURN_S, self._return)

    def _return(self) -> None:
        for seat in self._made_for:
            self._machine.return_seat(seat)

    async def _take(self, spec: WorkerSpec, child: "SeatedChild") -> None:
        try:
            for seat in self._made_for:
                await self._machine.take_seat(seat)
            if not child.is_over:
                child.started(self._machine.spawn(self._seated(spec), child))
        except (NoSeat, OSError) as error:
            child.exited(str(error), from_outside=True)
        if child.is_over and child is self._latest:  # else the device is for the one that was asked for since
            self._ended()

    def _seated(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the specification with the devices that Ray gave, which may differ from the planned ones."""
        now = {before: self._machine.devices[seat].uuid for seat, before in self._made_for.items()}
        visible = dict.fromkeys(now.get(uuid, uuid) for uuid in spec.visible_devices)
        return msgspec.structs.replace(spec, visible_devices=tuple(visible))


class SeatedChild:
    """A process that may have to wait for its devices.  A `Child`, and the ear of the one on the machine."""

    def __init__(self, ear: Ear, on_end: Callable[[], None]) -> None:
        self._ear = ear
        self._on_end = on_end
        self._child: Child | None = None
        self._waiting: asyncio.Task[None] | None = None
        self.is_over = False
        self.forked, self.received, self.printed = ear.forked, ear.received, ear.printed

    def wait(self, taking: Coroutine[Any, Any, None]) -> None:
        """Start it once its devices are there."""
        self._waiting = asyncio.get_running_loop().create_task(taking, name="take a device")

    def started(self, child: Child) -> None:
        """Note the process that was started."""
        self._child = child

    def write(self, buffers: Sequence[Buffer]) -> None:
        """See `Child.write`."""
        if self._child is not None:
            self._child.write(buffers)

    def hold(self, holds: bool) -> None:
        """See `Child.hold`."""
        if self._child is not None:
            self._child.hold(holds)

    def kill(self) -> None:
        """See `Child.kill`."""
        if self._child is not None:
            self._child.kill()
        elif not self.is_over:
            self.is_over = True  # at once: a device that comes now starts nothing
            asyncio.get_running_loop().call_soon(self._tell, "exited before it had a device", True)

    def look(self, reach: Reach) -> Standstill:
        """See `Child.look`."""
        return self._child.look(reach) if self._child is not None else Standstill()

    def exited(self, reason: str, from_outside: bool) -> None:
        """See `Ear.exited`."""
        if not self.is_over:
            self.is_over = True
            self._tell(reason, from_outside)

    def _tell(self, reason: str, from_outside: bool) -> None:
        self._on_end()
        self._ear.exited(reason, from_outside)
