"""Keeps one worker process per device running: starts, stops and wakes workers, restarts dead ones, kills hung ones.

Owns what is wished of workers and what becomes of them: `life` has the table, and `execution` the processes.  Knows no
requests: the fleet does.

    a worker dies                    restarted after 1, 2, 4 ... 60 s, until it has run for `steady_after_s`
    it dies while loading, in a row  given up after `MAX_FAILED_STARTS`
    it hangs                         killed (`hung`)
    it does not doze in time         stopped
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from melld.config import HealthConfig
from melld.engine.fleet.execution import Execution
from melld.engine.fleet.hung import HungWorkers
from melld.engine.fleet.life import Event, Intent, State, Who
from melld.engine.fleet.owner import Alone, Owner, WorkerStartFailed
from melld.engine.fleet.place import Place, Slot
from melld.engine.fleet.ports import WorkerListener
from melld.engine.fleet.process import WorkerEnded, WorkerProcess
from melld.engine.host.intake import Intake
from melld.engine.host.ports import Host
from melld.engine.wire import messages as wire
from melld.ids import WorkerId

log = logging.getLogger("melld.supervisor")


class Supervisor:
    """All workers, each in its place.  `owner` says which of them run."""

    def __init__(
        self,
        slots: Sequence[Slot],
        host: Host,
        listener: WorkerListener,
        health: HealthConfig,
        intake: Intake | None = None,
    ) -> None:
        self.places: dict[WorkerId, Place] = {}
        self._intent = Intent.OUT
        """Of the daemon with all of them: none is to start before the daemon does, or after its end."""
        self._listener = listener
        self._hung = HungWorkers(self.places.values(), health)
        self._steady_after_s = health.steady_after_s
        self._run = Execution(self, intake or Intake())
        self.owner: Owner = Alone(self.places, self._run)
        self.add(slots, host)

    async def start(self, on_ready: Callable[[Place], None] = lambda _: None) -> None:
        """Start every worker; return when each is ready or has failed once (those are restarted), and one is ready.

        Until then, call `on_ready` for each worker that becomes ready.

        Raises:
            WorkerStartFailed: no worker became ready; all have been stopped.
        """
        self._have_all(Intent.IN_SERVICE)
        for place in list(self.places.values()):
            self.owner.worker_freed(place)
        try:
            await self.owner.wait(on_ready)
        except WorkerStartFailed:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every worker; return when none is left."""
        self._have_all(Intent.OUT)
        await self._run.end_all(list(self.places.values()))

    def _have_all(self, intent: Intent) -> None:
        self._intent = intent
        for place in self.places.values():
            place.life.wish(Who.DAEMON, intent)

    def let_to(self, owner: Owner) -> None:
        """Let this owner decide from now on.  End running starts: the owner may not have room for them."""
        self.owner = owner
        self._have_all(Intent.IN_SERVICE)
        for worker, place in self.places.items():
            place.life.never_give_up()
            if not place.is_ready:
                self.stop_worker(worker)

    # -- machines, and what else is in a worker's way -----------------------------------------------------------------

    def add(self, slots: Sequence[Slot], host: Host) -> None:
        """Add places on this host, and start their workers if the others have been started."""
        for slot in slots:
            place = self.places[slot.worker] = Place(slot)
            place.life.wish(Who.DAEMON, self._intent)
            self._run.hosts[slot.worker] = host
            self._run.take(place, Event.WAKE)

    @contextlib.contextmanager
    def losing(self, workers: Iterable[WorkerId], why: str) -> Iterator[None]:
        """Start none of these workers until `bring_back`: their machine is lost, and the block ends their processes.

        Count those as dead, too, that had no process, unless an operator wants none.
        """
        places = [self.places[worker] for worker in workers]
        for place in places:
            place.life.obstacle = why
        yield
        for place in places:
            if place.life.may(Event.DIED) and place.life.wished_by(Who.OPERATOR) is not Intent.OUT:
                place.life.take(Event.DIED)
                place.detail = why

    def bring_back(self, workers: Iterable[WorkerId], host: Host) -> None:
        """Start these workers again: their machine is back, as this host."""
        for place in (self.places[worker] for worker in workers):
            self._run.hosts[place.slot.worker] = host
            self.unblock(place)

    def block(self, place: Place, obstacle: str) -> None:
        """Stop restarting the dead worker: another program fills its device, so the death was not its fault."""
        life = place.life
        if not life.obstacle:
            life.setbacks -= 1
            life.failed_starts -= 1
            log.warning("%s waits: %s", place.slot.worker, obstacle)
        life.obstacle = obstacle

    def unblock(self, place: Place) -> None:
        """Start the worker, now unobstructed, with no deaths counted against it."""
        place.life.obstacle, place.rested_s = "", 0.0
        place.life.forgive()
        self.owner.worker_freed(place)

    # -- one worker, on purpose -------------------------------------------------------------------------------------

    def start_worker(self, worker: WorkerId) -> None:
        """Start a worker that was stopped, is stopping, or was given up; ignore any other."""
        place = self.places[worker]
        place.life.wish(Who.OPERATOR, Intent.IN_SERVICE)
        place.rested_s = 0.0
        if not place.is_ready:
            self.wake(worker)

    def wake(self, worker: WorkerId) -> None:
        """Wake a sleeping or stopped worker: at once if its process is warm, else by a start if the owner agrees."""
        place = self.places[worker]
        if place.is_ready:
            self._run.take(place, Event.WAKE)
        elif place.life.may(Event.WAKE):
            self.owner.wanted(worker)

    def load(self, worker: WorkerId) -> bool:
        """Start a worker for its owner, respecting its back-off; return False if something is in its way."""
        place = self.places[worker]
        self._run.take(place, Event.RETRY if place.life.state is State.FAILED else Event.WAKE)
        return place.life.state is State.STARTING

    def doze(self, worker: WorkerId) -> None:
        """Have a worker doze for its owner, once its requests have ended; the listener hears of its end."""
        self._run.take(self.places[worker], Event.DOZE)

    def stop_dozing(self, worker: WorkerId) -> None:
        """Have a worker that is going to doze answer at once: its model is wanted."""
        place = self.places[worker]
        if place.is_going_to_doze and place.process is not None:
            place.process.send(wire.StopDozing())

    def stop_worker(self, worker: WorkerId, *, stay_out: bool = False) -> None:
        """End a worker's process in an orderly way, and keep it stopped until `start_worker` or `wake`.

        Returns at once, and the worker is no longer ready; the listener hears of an expected `WorkerEnded`.
        `stay_out`: an operator requested it; only `start_worker` ends that.
        """
        place = self.places[worker]
        if stay_out:
            place.life.wish(Who.OPERATOR, Intent.OUT)
        if place.life.may(Event.STOP):
            place.detail = ""
            self._run.take(place, Event.STOP)

    def sleep(self, worker: WorkerId) -> None:
        """Mark a ready worker as asleep.  Its process stays as it is until `stop_worker`."""
        self._run.take(self.places[worker], Event.SLEEP)

    def process(self, worker: WorkerId) -> WorkerProcess | None:
        """Return the worker's process if it is ready."""
        return place.process if (place := self.places[worker]).is_ready else None

    # -- what becomes of processes ----------------------------------------------------------------------------------

    def said(self, place: Place, message: Any, payload: list[bytes]) -> None:
        """See `PlaceListener`."""
        place.unanswered = 0
        match message:
            case wire.Pong():
                self._hung.judge_step(place, message)
            case wire.Dozed():
                self._dozed(place, message)
            case wire.WorkerReady():
                if place.process is not None and not place.process.asked_to_end:
                    self._ready(place, message, place.process)
            case _:
                self._listener.worker_said(place.slot, message, payload)

    def _ready(self, place: Place, message: wire.WorkerReady, process: WorkerProcess) -> None:
        level = logging.INFO if place.wake_s else logging.DEBUG  # the daemon reports the first start
        self._run.take(place, Event.IS_READY)
        place.detail = ""
        place.wake_s = asyncio.get_running_loop().time() - process.began_s
        if place.life.setbacks:
            self._run.later(place, self._steady_after_s, partial(self._steadied, place))
        text = "%s is ready on %s (pid %d, %.1f s)"
        log.log(level, text, place.slot.worker, place.slot.device, process.pid, message.load_s)
        self.owner.can_serve()
        self._listener.worker_said(place.slot, message, [])
        if place.is_ready:
            self.owner.is_ready(place)

    def _steadied(self, place: Place) -> None:
        place.life.forgive()
        self._listener.worker_steadied(place.slot)

    def _dozed(self, place: Place, dozed: wire.Dozed) -> None:
        """Report a dozing worker; stop one that cannot doze."""
        if not place.is_going_to_doze:
            return  # it is being stopped, or was woken
        worker = place.slot.worker
        if dozed.failure:
            log.info("%s cannot doze, stopping it: %s", worker, dozed.failure)
            self.stop_worker(worker)
            return
        place.dozing_bytes = dozed.resident_bytes
        self._run.take(place, Event.HAS_DOZED)
        self._listener.worker_ended(place.slot, WorkerEnded(worker, "it dozes", expected=True))

    def begins(self, place: Place) -> None:
        """See `PlaceListener`."""
        self.owner.begins(place.slot.worker)

    def ended(self, place: Place, ended: WorkerEnded) -> None:
        """See `PlaceListener`: notify all listeners, and restart a dead worker."""
        worker, failure = place.slot.worker, None
        if not ended.expected:
            failure = WorkerStartFailed(ended.worker, place.slot.device, ended.reason)
            log.error("worker %s (device %s) exited: %s", ended.worker, place.slot.device, ended.reason)
            place.rested_s = asyncio.get_running_loop().time() + place.life.back_off_s
        self._listener.worker_ended(place.slot, ended)
        self.owner.ended(worker, failure)
        self.owner.worker_ended(worker, ended)

    async def watch(self) -> None:
        """Kill hung workers, until cancelled."""
        while True:
            await asyncio.sleep(self._hung.interval_s)
            self._hung.look()
