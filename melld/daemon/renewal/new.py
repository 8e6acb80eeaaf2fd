"""The new daemon's side of a renewal: waits for devices, then for its turn to take requests.

Owns which workers wait for the other daemon.  `handover` decides.
"""

import asyncio
import os
import socket
from collections.abc import Callable, MutableMapping, Sequence

from melld.control.messages import Lend
from melld.daemon.model import LOADING, ServedModel
from melld.daemon.renewal import channel as wire
from melld.daemon.renewal.handover import Command, Event, State
from melld.daemon.renewal.old import BORROWER, LOOK_S, USER
from melld.daemon.watch import Condition
from melld.errors import MelldError


class NothingToReplace(MelldError):
    """The old daemon has not said what it has, or not so that this one understands it."""


class NewSide(wire.Side):
    """The side of a renewal that takes over."""

    def __init__(self, end: socket.socket, inherited: wire.Inherited, descriptors: list[int]) -> None:
        super().__init__(end, State.WAITING)
        self.inherited = inherited
        self.lock, control, *api = descriptors
        self.control = socket.socket(fileno=control)
        self.listeners = [socket.socket(fileno=one) for one in api]
        self._loan = Lend(command=BORROWER, pid=inherited.pid, user=USER)
        self._held = set(inherited.devices)
        self._accepted, self._has_device, self._other_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._left = wire.Left()
        self._idle: list[socket.socket] = []
        self.on_join: Callable[[list[socket.socket]], None] = self._idle.extend
        """Serves connections that the old daemon passes on; until then they are collected here."""
        self.acts = {
            Command.ASK: lambda: self.say(wire.Told(Event.WANTS)),
            Command.START: self._start,
            Command.START_ALL: self._start_all,
            Command.OFFER: lambda: self.say(wire.Told(Event.SERVES)),
            Command.ACCEPT: self._accepted.set,
        }

    @classmethod
    def found(cls, environment: MutableMapping[str, str]) -> "NewSide | None":
        """Return the renewal that this process was started for; None for an ordinary start."""
        if (descriptor := environment.pop(wire.VARIABLE, None)) is None:
            return None
        end = socket.socket(fileno=int(descriptor))
        os.set_inheritable(end.fileno(), False)
        match wire.receive(end):
            case (wire.Inherited() as inherited, descriptors):
                return cls(end, inherited, descriptors)
            case (wire.Failed(why), _):
                reason = why
            case _:
                reason = "the daemon to be replaced has exited"
        end.close()
        raise NothingToReplace(reason)

    def begin(self, models: Sequence[ServedModel], condition: Condition, inherit: Callable[[], None]) -> None:
        """Hold all workers back until their devices are handed over.  `inherit` reads the handover file."""
        self._models, self._condition, self._inherit = models, condition, inherit
        for model in models:
            for worker in model.parts.fleet.places:
                model.parts.driver.drains.lend(worker, self._loan)
        self.listen()
        self.changed()

    async def prepared(self) -> None:
        """Ask for a device, now that everything that can fail without one has been tried; return once there is one."""
        self.say(wire.Told(Event.WANTS))
        await self._has_device.wait()

    async def take_over(self) -> None:
        """Return once this daemon is to take requests; call it when a worker is ready."""
        self.happen(Event.WORKER_READY)
        await self._accepted.wait()

    def joined(self, on_join: Callable[[list[socket.socket]], None]) -> None:
        """Start serving the idle connections that the other passes on."""
        self.on_join = on_join
        on_join(self._idle)

    async def end_other(self) -> None:
        """End the other as well, if it is still running."""
        if self.state is State.TAKEN_OVER:
            self.say(wire.Told(Event.STOPPED))
            await self._other_ended.wait()

    def heard(self, message: wire.Message, descriptors: list[int]) -> None:
        """See `Side`."""
        match message:
            case wire.Given(devices):
                self._held -= set(devices)
                self.happen(Event.GIVEN)
            case wire.Told(Event.YOURS):
                self.on_join([socket.socket(fileno=one) for one in descriptors])
                if self.state is State.READY:
                    self.happen(Event.YOURS)
            case wire.Failed():
                self.say(message)  # which calls the renewal off, unless this daemon serves already
            case wire.Left():
                self._left = message
                self.changed()

    def changed(self) -> None:
        """See `Side`."""
        does = "has taken over" if self.state is State.TAKEN_OVER else "is taking over"
        calls = f", which ends its last {self._left.calls} calls" if self._left.calls else ""
        told = f"this daemon {does} from pid {self.inherited.pid}{calls}"
        self._condition.renewal = "" if self.is_alone else told
        if self.is_alone:
            self._other_ended.set()

    async def _start(self) -> None:
        """Start the workers that have all their devices; ask for more if there are none.

        Once this daemon takes requests, ask for more in any case, when each of these has loaded or has failed.
        """
        is_first = self.state is not State.TAKEN_OVER
        begun = await self._models[0].parts.driver.loans.take_back(self._loan, self._held)
        if begun:
            self._has_device.set()
        while not is_first and any(place.state in LOADING and not place.life.setbacks for place in begun):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        if not (is_first and begun):
            self.say(wire.Told(Event.WANTS))

    async def _start_all(self) -> None:
        """Start all workers but those that an operator has drained: these stay so."""
        self._held.clear()
        for model in self._models:
            for drain in model.parts.driver.drains.by_worker.values():
                known = {(name, device) for name in ("", model.name) for device in drain.place.slot.devices}
                if known.intersection(self._left.drained):
                    drain.loan = None
        if self.state is State.TAKEN_OVER:
            self._inherit()
        await self._start()
