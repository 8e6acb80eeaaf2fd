"""Executes the actions of workers' life cycles: starts, wakes and ends their processes, at once or later.

Owns the timers.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from melld.engine.fleet.life import WARM, Do, Event, State
from melld.engine.fleet.place import Place
from melld.engine.fleet.process import WorkerEnded, WorkerProcess
from melld.engine.host.intake import Intake
from melld.engine.host.ports import Host
from melld.engine.wire import messages as wire
from melld.ids import WorkerId

log = logging.getLogger("melld.supervisor")
STOP_DEADLINE_S = 5.0
DOZE_DEADLINE_S = 300.0
"""A worker that does not doze by then is stopped.  A GPU's weights need 0.7 s per GB (seen on an H200)."""


class PlaceListener(Protocol):
    """Hears of the processes."""

    def said(self, place: Place, message: Any, payload: list[bytes]) -> None:
        """Handle a worker's message."""

    def begins(self, place: Place) -> None:
        """Note that a process is started."""

    def ended(self, place: Place, ended: WorkerEnded) -> None:
        """Note that the process is gone."""


class Execution:
    """The processes of one fleet's workers.  `hosts`: where each is started."""

    def __init__(self, listener: PlaceListener, intake: Intake) -> None:
        self.hosts: dict[WorkerId, Host] = {}
        self._listener = listener
        self._intake = intake

    def take(self, place: Place, event: Event) -> None:
        """Advance the worker's life cycle, and do what that leads to."""
        self.do(place, self.note(place, event))

    def note(self, place: Place, event: Event) -> Do:
        """Advance the worker's life cycle; return what to do."""
        was = place.life.state
        do = place.life.take(event)
        if place.life.state is not was and not {was, place.life.state} <= WARM:
            _forget_timer(place)
        return do

    def do(self, place: Place, do: Do) -> None:
        """Carry out an event's actions."""
        process = place.process
        match do:
            case Do.BEGIN:
                self._begin(place)
            case Do.DOZE if process is not None:
                process.send(wire.Doze())
                late = wire.Dozed(failure=f"no reply for {DOZE_DEADLINE_S:g} s")
                self.later(place, DOZE_DEADLINE_S, partial(self._listener.said, place, late, []))
            case Do.END | Do.KILL if process is not None:
                _end(process, do)
            case Do.END | Do.KILL:
                self._ended(place, WorkerEnded(place.slot.worker, "stopped before it started", expected=True))

    def restart(self, place: Place) -> None:
        """Restart the dead worker after a back-off, unless it is given up."""
        if place.life.given_up:
            then = f"`melld resume {place.slot.worker}` tries again"
            place.detail = f"given up after {place.life.failed_starts} failed starts ({place.detail}); {then}"
            log.error("%s: %s", place.slot.worker, place.detail)
            return
        self.later(place, place.life.back_off_s, partial(self.take, place, Event.RETRY))

    def later(self, place: Place, delay_s: float, act: Callable[[], None]) -> None:
        """Do this to the worker after a delay, unless its state changes first."""
        _forget_timer(place)
        place.timer = asyncio.get_running_loop().call_later(delay_s, act)

    async def end_all(self, places: list[Place]) -> None:
        """End all processes; return when none is left."""
        for place in places:
            _forget_timer(place)
        there = [(place, place.process) for place in places if place.process is not None]
        for place, process in there:
            _end(process, place.life.take(Event.STOP))
        await asyncio.gather(*[process.wait_ended() for _, process in there])

    def _begin(self, place: Place) -> None:
        """Start a process, or wake a dozing one; replace an ending one once it has ended."""
        if place.life.state is not State.STARTING:
            return  # no longer wanted
        place.unanswered = 0
        if place.process is not None:
            if not place.process.asked_to_end:
                place.process.wake()
            return
        if (left_s := place.rested_s - asyncio.get_running_loop().time()) > 0.0:
            self.later(place, left_s, partial(self._begin, place))
            return
        self._listener.begins(place)
        hear = partial(self._listener.said, place), partial(self._ended, place)
        try:
            place.process = WorkerProcess(place.slot.spec, self.hosts[place.slot.worker], *hear, self._intake)
        except Exception as error:  # the boundary of one start: out of descriptors or memory, which may pass, or a bug
            if not isinstance(error, OSError):
                log.exception("cannot start %s", place.slot.worker)
            self._ended(place, WorkerEnded(place.slot.worker, f"cannot start a process: {error}", expected=False))

    def _ended(self, place: Place, ended: WorkerEnded) -> None:
        place.process = None
        do = self.note(place, Event.ENDED if ended.expected else Event.DIED)
        if not ended.expected:
            place.detail = ended.reason
        self._listener.ended(place, ended)
        self.do(place, do)


def _forget_timer(place: Place) -> None:
    if place.timer is not None:
        place.timer.cancel()
        place.timer = None


def _end(process: WorkerProcess, do: Do) -> None:
    """Ask a process to end; kill one that has nothing to clean up, unless it is already ending."""
    process.stop(0.0 if do is Do.KILL and not process.asked_to_end else STOP_DEADLINE_S)
