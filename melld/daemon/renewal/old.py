"""The old daemon's side of a renewal: starts the new daemon and hands everything over step by step.

Owns the new daemon's process.  `handover` decides.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from melld.control.messages import Lend, Renewal, RenewalStep
from melld.daemon.renewal import channel as wire
from melld.daemon.renewal.handover import Command, Event, State
from melld.daemon.renewal.legacy import NotLeft
from melld.driver.lendable import NeverLent, NothingToLend
from melld.driver.loans import all_answered

if TYPE_CHECKING:
    from melld.daemon.renewal.succession import Succession

log = logging.getLogger("melld.renewal")
BORROWER, USER = "melld serve", "renewal"
LOOK_S = 0.2
MAIN_PID_TRIES = 25


class OldSide(wire.Side):
    """The side of a renewal that hands over."""

    def __init__(self, daemon: "Succession") -> None:
        """Start the new daemon with this one's command line, from whatever is installed there now."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours, State.STARTED)
        self._daemon = daemon
        self._loans = daemon.models[0].parts.driver.loans
        self._reason = "it has exited: see the log"
        self.news = asyncio.Event()
        """Set when the state has changed."""
        self.acts = {
            Command.LEND: self._lend,
            Command.AWAIT_STREAMS: self._await_streams,
            Command.CLOSE: self._close_entrance,
            Command.LEAVE: self._leave,
            Command.SAY_YOURS: self._say_yours,
            Command.END_OTHER: self._end_other,
            Command.GO_ON: self._go_on,
            Command.END: daemon.end,
        }
        words, environment = [sys.executable, *sys.orig_argv[1:]], {**daemon.started_with}
        environment[wire.VARIABLE] = str(number := theirs.fileno())
        with theirs:
            self._process = subprocess.Popen(words, pass_fds=(number,), env=environment, stdin=subprocess.DEVNULL)  # noqa: S603  our own command
        self._loan = Lend(command=BORROWER, pid=self._process.pid, user=USER)
        self.say(*daemon.inheritance())
        self.listen()
        self.changed()

    def told(self) -> Renewal:
        """Return the progress."""
        calls, new, old = self._daemon.admission.in_flight, f"pid {self._process.pid}", f"pid {os.getpid()}"
        limit = f"at most {self._daemon.settings.config.server.drain_s:g} s"
        waits = f"new requests wait until {calls} calls end ({limit}) and {new} has loaded"
        renewed = RenewalStep.RENEWED, f"{new} is serving; {old} exits after its {calls} calls"
        step, told = {
            State.STARTED: (RenewalStep.UNDER_WAY, f"{new} is reading its settings and importing"),
            State.GIVING: (RenewalStep.UNDER_WAY, f"draining a device for {new} to load on"),
            State.CLOSED: (RenewalStep.UNDER_WAY, f"no second device is available: {waits}"),
            State.HANDED_OVER: renewed,
            State.ENDED: renewed,
            State.SERVING: (RenewalStep.KEPT, self._reason),
            State.STOPPED: (RenewalStep.STOPPED, f"{old} was told to stop, and ends {new} too"),
        }[self.state]
        return Renewal(step=step, pid=self._process.pid, told=told)

    def changed(self) -> None:
        """See `Side`."""
        told = self.told().told
        self.news.set()
        self._daemon.condition.renewal = "" if self.state is State.SERVING else told
        if self.state is State.SERVING:
            self._daemon.side = None
            log.error("renewal failed, the old daemon keeps serving: %s", told)
        else:
            log.info("renewal %s: %s", self.state, told)

    def heard(self, message: wire.Message, _descriptors: list[int]) -> None:
        """See `Side`."""
        match message:
            case wire.Told(Event.WANTS) if self.state is State.CLOSED:
                self._give_up("its workers need more devices than are available")
            case wire.Told(event):
                self.happen(event)
            case wire.Failed(reason):
                self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self.happen(Event.CALLED_OFF)

    def last_words(self) -> None:
        """Send the last message, as this daemon ends."""
        self._say_left()
        self.close()

    # -- commands ----------------------------------------------------------------------------------------------------

    async def _lend(self) -> None:
        while True:
            try:
                drains = self._loans.give(self._loan, everything=self.state is State.CLOSED)
                break
            except (NothingToLend, NeverLent):
                if self.state is State.GIVING:
                    self.happen(Event.NONE_TO_SPARE)
                    return
                await asyncio.sleep(LOOK_S)
        await all_answered(drains)
        self.say(wire.Given(tuple({device for drain in drains for device in drain.place.slot.devices})))

    async def _await_streams(self) -> None:
        """Wait until all calls have ended, without a limit if the new daemon has another device to serve with."""
        admission = self._daemon.admission
        limit_s = self._daemon.settings.config.server.drain_s
        if self.state is State.CLOSED and not await admission.wait_idle(limit_s):
            log.warning("renewal: ending %d calls that did not finish in time", admission.abort())
            await admission.wait_idle(None)
        while not await admission.wait_idle(LOOK_S):
            self._say_left()
        self.happen(Event.STREAMS_ENDED)

    def _say_left(self) -> None:
        models = self._daemon.models
        each = [(model.name * (len(models) > 1), model.parts.driver.drains.by_worker.values()) for model in models]
        kept = [(name, one.place) for name, drains in each for one in drains if one.loan is None and one.is_over]
        drained = tuple((name, device) for name, place in kept for device in place.slot.devices)
        self.say(wire.Left(self._daemon.admission.in_flight, drained))

    async def _leave(self) -> None:
        try:
            await self._daemon.leave()
        except NotLeft as error:
            self._give_up(str(error))
        else:
            self.happen(Event.LEFT)

    def _close_entrance(self) -> None:
        self._daemon.entrance.close()
        if self.state is State.CLOSED:
            self._daemon.admission.begin_drain()

    async def _say_yours(self) -> None:
        """Pass on the idle connections, and stop being the service manager's main process."""
        daemon = self._daemon
        daemon.control.is_given_away = True
        await daemon.speak_for_service(False)
        await self._name_main(self._process.pid)
        await daemon.answering.rest()
        idle = daemon.entrance.give_away()
        for start in range(0, max(1, len(idle)), wire.MAX_DESCRIPTORS):
            part = idle[start : start + wire.MAX_DESCRIPTORS]
            self.say(wire.Told(Event.YOURS), [one.fileno() for one in part])
        for one in idle:
            one.close()
        self.happen(Event.YOURS)

    async def _name_main(self, pid: int) -> None:
        """Tell the service manager which its main process is: when that ends, it ends all others too."""
        for _ in range(MAIN_PID_TRIES):
            if not self._daemon.notifier.has_manager or self._daemon.notifier.send(MAINPID=str(pid)):
                break
            await asyncio.sleep(LOOK_S)

    def _end_other(self) -> None:
        """End the new daemon, and with it its workers."""
        self.close()
        self._process.kill()

    async def _go_on(self) -> None:
        """Return to normal service."""
        try:
            self._daemon.admission.reopen()
            self._daemon.entrance.open()
            if self._daemon.control.is_given_away:
                await self._name_main(os.getpid())
                await self._daemon.speak()
        finally:
            await asyncio.to_thread(self._process.wait)
            await self._loans.take_back(self._loan)
