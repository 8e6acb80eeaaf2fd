"""The new daemon's side of a renewal: waits for devices, then for its turn to take requests.

Owns this daemon's end of the channel, and which workers wait for the other daemon.  `handover` decides.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from melld.control.messages import CONTROL_SOCKET, Lend
from melld.control.runtime_directory import ControlSocket
from melld.daemon.model import LOADING, ServedModel
from melld.daemon.renewal import channel as wire
from melld.daemon.renewal.handover import NEW_TABLE, Command, Event, New, step
from melld.daemon.renewal.old import BORROWER, LOOK_S, USER
from melld.daemon.watch import Condition
from melld.errors import MelldError


class CalledOff(MelldError):
    """The old daemon keeps serving; this one is not needed."""


class NewSide:
    """The side of a renewal that takes over."""

    def __init__(self, end: socket.socket, inherited: wire.Inherited, descriptors: list[int]) -> None:
        self.state = New.PREPARING
        self.inherited = inherited
        self._lock, control, *api = descriptors
        self._control = socket.socket(fileno=control)
        self.listeners = [socket.socket(fileno=one) for one in api]
        self._end = end
        self._loan = Lend(command=BORROWER, pid=inherited.pid, user=USER)
        self._held = set(inherited.devices)
        self._accept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_device, self._other_ended = asyncio.Event(), asyncio.Event()
        self._idle: list[socket.socket] = []
        self._drained: tuple[tuple[str, str], ...] = ()
        self._tasks: set[asyncio.Task[object]] = set()
        self.on_join: Callable[[list[socket.socket]], None] = self._idle.extend
        """Serves connections that the old daemon passes on; until then they are collected here."""

    @classmethod
    def found(cls, environment: MutableMapping[str, str]) -> "NewSide | None":
        """Return the renewal that this process was started for; None for an ordinary start."""
        if (descriptor := environment.pop(wire.VARIABLE, None)) is None:
            return None
        end = socket.socket(fileno=int(descriptor))
        os.set_inheritable(end.fileno(), False)
        received = wire.receive(end)
        match received:
            case (wire.Inherited() as inherited, descriptors):
                return cls(end, inherited, descriptors)
        raise CalledOff("the daemon to be replaced has exited")

    def control_socket(self, directory: Path) -> ControlSocket | None:
        """Return the other's locked control socket, shared from now on; None if this daemon uses another directory."""
        if str(directory) != self.inherited.directory:
            return None
        shared = ControlSocket(directory / CONTROL_SOCKET, self._lock, self._control)
        shared.is_given_away = True  # until this daemon takes over
        return shared

    def begin(
        self,
        models: Sequence[ServedModel],
        condition: Condition,
        stop: Callable[[], None],
        inherit: Callable[[], None],
    ) -> None:
        """Hold all workers back until their devices are handed over.  `inherit` reads the handover file."""
        self._models, self._condition, self._stop, self._inherit = models, condition, stop, inherit
        for model in models:
            for worker in model.parts.fleet.places:
                model.parts.driver.drains.lend(worker, self._loan)
        self._channel = wire.Channel(self._end, self._heard, self._ended)
        self._tell()

    async def prepared(self) -> None:
        """Ask for a device, now that everything that can fail without one has been tried; return once there is one."""
        self._happen(Event.PREPARED)
        await self._has_device.wait()

    async def take_over(self) -> None:
        """Return once this daemon is to take requests; call it when a worker is ready.

        Raises:
            CalledOff: the renewal was cancelled.
        """
        self._happen(Event.WORKER_READY)
        await self._accept
        self._inherit()

    def joined(self, on_join: Callable[[list[socket.socket]], None]) -> None:
        """Start serving the idle connections that the other passes on."""
        self.on_join = on_join
        on_join(self._idle)
        self._tell()

    @property
    def is_alone(self) -> bool:
        """Return True once the other has ended."""
        return self._end.fileno() < 0

    def stopping(self) -> None:
        """Tell the other to end as well, if it is still running."""
        if self.state is New.SERVING:
            self._channel.say(wire.Stops())

    async def wait_other_ended(self) -> None:
        """Wait until the other has ended."""
        if self.state is New.SERVING:
            await self._other_ended.wait()

    def _heard(self, message: wire.Message, descriptors: list[int]) -> None:
        match message:
            case wire.Given(devices):
                self._held -= set(devices)
                self._happen(Event.GIVEN)
            case wire.Yours():
                self.on_join([socket.socket(fileno=one) for one in descriptors])
                if self.state is New.READY:
                    self._happen(Event.YOURS)
            case wire.CalledOff():
                self._happen(Event.CALLED_OFF)
            case wire.Left(calls):
                self._tell(f", which ends its last {calls} calls")
            case wire.Gone(drained):
                self._drained = drained

    def _ended(self) -> None:
        if self.state is not New.ENDED:
            self._happen(Event.OTHER_ENDED)
        self._condition.renewal = ""
        self._other_ended.set()

    def _happen(self, event: Event) -> None:
        self.state, commands = step(NEW_TABLE, self.state, event)
        for command in commands:
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Command.ASK:
                self._channel.say(wire.Wants())
            case Command.START:
                self._run(self._start(settles=self.state is New.SERVING))
            case Command.START_ALL:
                self._held.clear()
                for model in self._models:
                    names, drains = {"", model.name}, model.parts.driver.drains.by_worker.values()
                    for drain in drains:  # these stay drained for the operator
                        if any(name in names and device in drain.place.slot.devices for name, device in self._drained):
                            drain.loan = None
                self._run(self._start())
                if self.state is New.SERVING:
                    self._inherit()
            case Command.OFFER:
                self._channel.say(wire.Serves())
            case Command.ACCEPT:
                if not self._accept.done():
                    self._accept.set_result(None)
            case Command.END:
                if not self._accept.done():
                    self._accept.set_exception(CalledOff("renewal cancelled: the old daemon keeps serving"))
                    self._accept.exception()  # perhaps nobody awaits it yet
                self._stop()

    async def _start(self, *, settles: bool = False) -> None:
        """Start the workers that have all their devices; `settles`: wait until each has loaded, or has failed."""
        begun = await self._models[0].parts.driver.loans.take_back(self._loan, self._held)
        if begun:
            self._has_device.set()
        while settles and any(place.state in LOADING and not place.life.setbacks for place in begun):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        if not self.is_alone and (settles or not begun):
            self._happen(Event.SETTLED if begun else Event.SHORT)

    def _run(self, work: Coroutine[Any, Any, object]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    def _tell(self, calls: str = "") -> None:
        does = "this daemon is taking over from" if self.state is not New.SERVING else "this daemon has taken over from"
        self._condition.renewal = f"{does} pid {self.inherited.pid}{calls}"
