"""The old daemon's side of a renewal: starts the new daemon and hands everything over step by step.

Owns the new daemon's process and this daemon's end of the channel.  `handover` decides.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from melld.control.messages import Lend, Renewal, RenewalStep
from melld.daemon.renewal import channel as wire
from melld.daemon.renewal.handover import OLD_TABLE, Command, Event, Old, step
from melld.daemon.renewal.legacy import NotLeft
from melld.driver.drain import WorkerDrain
from melld.driver.lendable import NeverLent, NothingToLend
from melld.driver.loans import all_answered

if TYPE_CHECKING:
    from melld.daemon.renewal.succession import Succession

log = logging.getLogger("melld.renewal")
BORROWER, USER = "melld serve", "renewal"
LOOK_S = 0.2
KILL_AFTER_S = 5.0
MAIN_PID_TRIES = 25


class OldSide:
    """The side of a renewal that hands over."""

    def __init__(self, daemon: "Succession", on_over: Callable[[], None]) -> None:
        self.state = Old.PREPARING
        self._daemon = daemon
        self._on_over = on_over
        self._loans = daemon.models[0].parts.driver.loans
        self._work: dict[Command, asyncio.Task[Any]] = {}
        self._reason = ""
        self.news = asyncio.Event()
        """Set when the state has changed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._begin(theirs.fileno())
        self._loan = Lend(command=BORROWER, pid=self._process.pid, user=USER, even_last=True)
        self._channel = wire.Channel(ours, self._heard, self._ended)
        settings, places = daemon.settings, daemon.models[0].parts.fleet.places.values()
        handed = daemon.control.lock, daemon.control.listener.fileno(), *(one.fileno() for one in settings.listeners)
        houses = daemon.landlord.landlord.houses.values()
        inherited = wire.Inherited(
            pid=os.getpid(),
            directory=str(daemon.control.path.parent),
            host=settings.config.server.host,
            port=settings.config.server.port,
            is_adopted=settings.is_adopted,
            devices=tuple(device for place in places for device in place.slot.devices),
            memory_bytes=sum(one.ledger.memory_bytes for one in houses if one.name.startswith("cpu")),
            has_stand_in=daemon.has_stand_in or not daemon.notifier.has_manager,
        )
        self._channel.say(inherited, handed)
        self._tell()

    @property
    def pid(self) -> int:
        """Return the new daemon's process id."""
        return self._process.pid

    def told(self) -> Renewal:
        """Return the progress."""
        calls = self._daemon.admission.in_flight
        match self.state:
            case Old.SERVING:
                return Renewal(step=RenewalStep.KEPT, pid=self.pid, told=self._reason or "it has exited: see the log")
            case Old.HANDED_OVER | Old.ENDED:
                told = f"pid {self.pid} is serving; pid {os.getpid()} exits after its {calls} calls"
                return Renewal(step=RenewalStep.RENEWED, pid=self.pid, told=told)
            case Old.CLOSED:
                drain_s = self._daemon.settings.config.server.drain_s
                told = (
                    f"no second device is available: new requests wait until {calls} calls end (at most {drain_s:g} s)"
                )
                told += f" and pid {self.pid} has loaded"
            case Old.GIVING:
                told = f"draining a device for pid {self.pid} to load on"
            case _:
                told = f"pid {self.pid} is reading its settings and importing"
        return Renewal(step=RenewalStep.UNDER_WAY, pid=self.pid, told=told)

    def happen(self, event: Event) -> None:
        """Handle an event, unless the renewal is over."""
        if self.state in (Old.SERVING, Old.ENDED):
            return
        self.state, commands = step(OLD_TABLE, self.state, event)
        if self.state in (Old.SERVING, Old.ENDED):
            for task in self._work.values():
                task.cancel()
        for command in commands:
            work = self._do(command)
            if work is not None:
                self._work[command] = asyncio.create_task(work, name=f"renewal: {command}")
        self._tell()

    def _tell(self) -> None:
        renewal = self.told()
        self.news.set()
        self._daemon.condition.renewal = "" if self.state is Old.SERVING else renewal.told
        if self.state is Old.SERVING:
            log.error("renewal failed, the old daemon keeps serving: %s", renewal.told)
            self._on_over()
        else:
            log.info("renewal %s: %s", self.state, renewal.told)

    def _begin(self, descriptor: int) -> subprocess.Popen[bytes]:
        """Start the new daemon with this one's command line, from whatever is installed there now."""
        environment = {**self._daemon.started_with, wire.VARIABLE: str(descriptor)}
        return subprocess.Popen(  # noqa: S603  our own command
            [sys.executable, *sys.orig_argv[1:]], pass_fds=(descriptor,), env=environment, stdin=subprocess.DEVNULL
        )

    def _heard(self, message: wire.Message, _descriptors: list[int]) -> None:
        match message:
            case wire.Wants():
                if self.state is Old.CLOSED:
                    self._reason = "its workers need more devices than are available"
                self.happen(Event.WANTS)
            case wire.Serves():
                self.happen(Event.SERVES)
            case wire.Failed(reason):
                self._reason = reason
            case wire.Stops():
                self._daemon.end()

    def _ended(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.happen(Event.OTHER_ENDED)
        self._work[Command.CALL_OFF] = asyncio.create_task(asyncio.to_thread(self._reap), name="renewal: reap")

    def _reap(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_AFTER_S)
            return
        self._process.kill()
        self._process.wait()

    # -- commands ----------------------------------------------------------------------------------------------------

    def _do(self, command: Command) -> Coroutine[Any, Any, object] | None:
        daemon = self._daemon
        match command:
            case Command.LEND:
                return self._lend()
            case Command.LEND_ALL:
                return self._lend_all()
            case Command.AWAIT_STREAMS:
                return self._await_streams()
            case Command.LEAVE:
                return self._leave()
            case Command.SAY_YOURS:
                return self._say_yours()
            case Command.CLOSE:
                daemon.entrance.close()
                if self.state is Old.CLOSED:
                    daemon.admission.begin_drain()
            case Command.OPEN:
                return self._open()
            case Command.TAKE_BACK:
                return self._loans.take_back(self._loan)
            case Command.CALL_OFF:
                self._channel.say(wire.CalledOff())
                self._channel.close()
                return asyncio.to_thread(self._reap)
            case Command.END:
                daemon.end()
        return None

    async def _lend(self) -> None:
        while True:
            try:
                drains = self._loans.give(self._loan)
                break
            except (NothingToLend, NeverLent):
                if self.state is Old.GIVING:
                    self.happen(Event.NONE_TO_SPARE)
                    return
                await asyncio.sleep(LOOK_S)
        await self._give(drains)

    async def _lend_all(self) -> None:
        await self._give(self._loans.give(self._loan, everything=True))

    async def _give(self, drains: Sequence[WorkerDrain]) -> None:
        await all_answered(drains)
        self._channel.say(wire.Given(tuple({device for drain in drains for device in drain.place.slot.devices})))

    async def _await_streams(self) -> None:
        """Wait until all calls have ended, without a limit if the new daemon has another device to serve with."""
        admission = self._daemon.admission
        limit_s = self._daemon.settings.config.server.drain_s
        if self.state is Old.CLOSED and not await admission.wait_idle(limit_s):
            log.warning("renewal: ending %d calls that did not finish in time", admission.abort())
            await admission.wait_idle(None)
        while not await admission.wait_idle(LOOK_S):
            self._channel.say(wire.Left(admission.in_flight))
        self.happen(Event.STREAMS_ENDED)

    async def _leave(self) -> None:
        try:
            await self._daemon.leave()
        except NotLeft as error:
            self._reason = str(error)
            self.happen(Event.NOT_LEFT)
        else:
            self.happen(Event.LEFT)

    async def _say_yours(self) -> None:
        """Pass on the idle connections, and stop being the service manager's main process."""
        daemon = self._daemon
        daemon.control.is_given_away = True
        await daemon.speak_for_service(False)
        for _ in range(MAIN_PID_TRIES):  # if this were lost, the manager would end both daemons with this one
            if not daemon.notifier.has_manager or daemon.notifier.send(MAINPID=str(self.pid)):
                break
            await asyncio.sleep(LOOK_S)
        await daemon.answering.rest()
        idle = daemon.entrance.give_away()
        for start in range(0, max(1, len(idle)), wire.MAX_DESCRIPTORS):
            part = idle[start : start + wire.MAX_DESCRIPTORS]
            self._channel.say(wire.Yours(), [one.fileno() for one in part])
        for one in idle:
            one.close()

    async def _open(self) -> None:
        """Return to normal service."""
        daemon = self._daemon
        daemon.admission.reopen()
        daemon.entrance.open()
        if daemon.control.is_given_away:
            daemon.control.is_given_away = False
            await daemon.answering.listen()
            await daemon.speak_for_service(True)

    def close(self) -> None:
        """Send the last message, as this daemon ends."""
        for task in self._work.values():
            task.cancel()
        models = self._daemon.models
        each = [(model.name * (len(models) > 1), model.parts.driver.drains.by_worker.values()) for model in models]
        kept = [(name, one.place) for name, drains in each for one in drains if one.loan is None and one.is_over]
        self._channel.say(wire.Gone(tuple((name, device) for name, place in kept for device in place.slot.devices)))
        self._channel.close()
