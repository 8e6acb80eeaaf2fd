"""Keeps one worker process per device as it should be: starts, stops, wakes, restarts the dead, fences the hung.

Owns the processes and their back-off.  Never knows a request: the fleet does.  `supervisor_place` has the lifecycle.

    a worker that was ready and dies        restarted after 1, 2, 4 ... 60 s
    one that dies while loading, in a row   likewise, and given up after `MAX_FAILED_STARTS`
    one that answers no ping                killed (SIGSTOP, a dead I/O thread)
    one whose step never ends               killed once the step has lasted `step_deadline_s`
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from melld.engine import wire
from melld.engine.process import ProcessState, WorkerEnded, WorkerProcess
from melld.engine.process_template import Template
from melld.engine.supervisor_place import MAX_FAILED_STARTS, Place, Slot
from melld.errors import MelldError
from melld.ids import WorkerId
from melld.status import WorkerState

__all__ = ["Patience", "Place", "Slot", "Supervisor", "WorkerStartFailed"]

log = logging.getLogger("melld.supervisor")
PING_INTERVAL_S = 1.0
STOP_DEADLINE_S = 5.0


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a worker may be silent before it counts as hung."""

    silence_s: float = 10.0
    """Without an answer to a ping.  Answers come from an I/O thread, also while a step runs."""
    step_s: float = 300.0
    """In one engine step."""


class WorkerStartFailed(MelldError):
    """A worker could not be started when the daemon was."""

    def __init__(self, worker: str, device: str, reason: str) -> None:
        super().__init__(f"worker {worker} on {device} could not start: {reason}")
        self.worker = worker
        self.device = device
        self.reason = reason


class Listener(Protocol):
    """Who is told; on the event loop."""

    def worker_said(self, slot: Slot, message: Any, payload: list[bytes]) -> None:
        """A frame came."""

    def worker_ended(self, slot: Slot, ended: WorkerEnded) -> None:
        """The process is gone; nothing more comes from it."""


class Supervisor:
    """All places."""

    def __init__(self, slots: Sequence[Slot], listener: Listener, patience: Patience | None = None) -> None:
        self.places = {slot.worker: Place(slot) for slot in slots}
        self._listener = listener
        self._patience = patience or Patience()
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_start: asyncio.Future[None] | None = None
        self._stopping = False
        self.on_change: Callable[[], None] = lambda: None
        first = slots[0].spec
        self.template = Template(first.device_kind, first.environment)

    async def start(self) -> None:
        """Start every worker and wait until all are ready.

        Raises:
            WorkerStartFailed: one of them ended instead; the others have been stopped.
        """
        self._first_start = asyncio.get_running_loop().create_future()
        for place in self.places.values():
            await self._spawn(place)
        try:
            await self._first_start
        except WorkerStartFailed:
            await self.stop()
            raise
        finally:
            self._first_start = None
        self._own(self._watch(), "watch workers")

    async def stop(self) -> None:
        """End every worker; returns when none is left."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        processes = [place.process for place in self.places.values() if place.process is not None]
        for place in self.places.values():
            if place.process is not None and place.state is not WorkerState.STOPPING:
                place.step("stop")
        await asyncio.gather(*(process.stop(STOP_DEADLINE_S) for process in processes))
        self.template.stop()

    # -- one worker, on purpose -------------------------------------------------------------------------------------

    def start_worker(self, worker: WorkerId) -> None:
        """Start the process of a worker that was stopped, is being stopped, or was given up; else nothing.

        Returns at once: `WorkerReady`, or the process's end, reaches the listener.
        """
        place = self.places[worker]
        place.stays_out = False
        if self._stopping:
            return
        if place.given_up:
            place.failed_starts = 0
        elif place.state not in (WorkerState.STOPPED, WorkerState.STOPPING):
            return
        place.step("start")
        if place.process is None:
            self._own(self._spawn(place), f"start {worker}")
        self.on_change()

    def stop_worker(self, worker: WorkerId, *, stay_out: bool = False) -> None:
        """End a worker's process in good order, and keep it stopped until `start_worker` or `wake`.

        Returns at once, and from now on the worker is not ready; `WorkerEnded`, `expected`, reaches the listener.
        `stay_out`: an operator wants it so; only `start_worker` ends that.
        """
        place = self.places[worker]
        place.stays_out = place.stays_out or stay_out
        if place.state in (WorkerState.STOPPING, WorkerState.STOPPED):
            return
        had_failed = place.state is WorkerState.FAILED
        place.step("stop")
        place.detail = ""
        if place.process is not None:
            self._own(place.process.stop(STOP_DEADLINE_S), f"stop {worker}")
        elif not had_failed:  # it was about to be started
            place.step("ended")
        self.on_change()

    def sleep(self, worker: WorkerId) -> None:
        """It is not needed now.  Its process stays as it is until `stop_worker`."""
        place = self.places[worker]
        if place.state is WorkerState.READY:
            place.step("sleep")

    def wake(self, worker: WorkerId) -> None:
        """It is needed: at once if its process is warm, else as soon as it is ready."""
        place = self.places[worker]
        if place.state is WorkerState.ASLEEP:
            place.step("wake")
        elif not (place.given_up or place.stays_out):
            self.start_worker(worker)

    def process(self, worker: WorkerId) -> WorkerProcess | None:
        """The process in that place if it is ready."""
        place = self.places[worker]
        process = place.process
        return process if process is not None and process.state is ProcessState.READY else None

    def _own(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _spawn(self, place: Place) -> None:
        if place.process is not None or place.state not in (WorkerState.STARTING, WorkerState.WAKING):
            return  # it is wanted no longer, or was started meanwhile
        place.process = WorkerProcess(
            place.slot.spec,
            self.template,
            lambda message, payload: self._said(place, message, payload),
            lambda ended: self._ended(place, ended),
        )
        place.unanswered = 0
        place.began_s = asyncio.get_running_loop().time()
        await place.process.start()
        self.on_change()

    def _said(self, place: Place, message: Any, payload: list[bytes]) -> None:
        place.unanswered = 0
        if isinstance(message, wire.Pong):
            self._judge_step(place, message)
            return
        if isinstance(message, wire.WorkerReady):
            if place.process is None or place.process.state is not ProcessState.READY:
                return  # it became ready while it was being ended
            place.step("ready")
            place.failed_starts = 0
            place.detail = ""
            place.wake_s = asyncio.get_running_loop().time() - place.began_s
            level = logging.INFO if place.has_been_ready else logging.DEBUG  # of the first start the daemon tells
            what = (place.slot.worker, place.slot.device, message.pid, message.load_s)
            log.log(level, "%s is ready on %s (pid %d, %.1f s)", *what)
            place.has_been_ready = True
        self._listener.worker_said(place.slot, message, payload)
        if isinstance(message, wire.WorkerReady):
            self._check_first_start()
            self.on_change()

    def _ended(self, place: Place, ended: WorkerEnded) -> None:
        place.process = None
        if ended.expected:
            place.step("ended")
        else:
            place.step("died")
            place.detail = ended.reason
            log.error("%s on %s is gone: %s", ended.worker, place.slot.device, ended.reason)
        self._listener.worker_ended(place.slot, ended)
        if self._first_start is not None and not self._first_start.done() and not ended.expected:
            self._first_start.set_exception(WorkerStartFailed(ended.worker, place.slot.device, ended.reason))
        elif not self._stopping and place.state is WorkerState.FAILED:
            self._restart(place, ended)
        elif not self._stopping and place.state is WorkerState.WAKING:
            self._own(self._spawn(place), f"start {ended.worker}")
        self.on_change()

    def _check_first_start(self) -> None:
        waiting = self._first_start
        if waiting is not None and not waiting.done() and all(place.is_ready for place in self.places.values()):
            waiting.set_result(None)

    def _restart(self, place: Place, ended: WorkerEnded) -> None:
        place.failed_starts = place.failed_starts + 1 if not ended.was_ready else 1
        if place.failed_starts >= MAX_FAILED_STARTS:
            place.detail = f"given up after {place.failed_starts} failed starts: {ended.reason}"
            log.error("%s: %s", place.slot.worker, place.detail)
            return
        place.restarts += 1
        self._own(self._start_again(place), f"restart {place.slot.worker}")

    async def _start_again(self, place: Place) -> None:
        await asyncio.sleep(place.back_off_s)
        if place.state is WorkerState.FAILED and not place.given_up:
            place.step("start")
            await self._spawn(place)

    # -- hung workers -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        allowed = max(2, round(self._patience.silence_s / PING_INTERVAL_S))
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            for place in self.places.values():
                if place.process is None or not place.is_ready:
                    continue
                if place.unanswered >= allowed:
                    log.error("%s answers no ping for %.0f s: killed", place.slot.worker, self._patience.silence_s)
                    place.process.kill()
                place.unanswered += 1
                place.process.send(wire.Ping())

    def _judge_step(self, place: Place, pong: wire.Pong) -> None:
        if pong.busy_s > self._patience.step_s and place.process is not None:
            log.error("%s is in one step for %.0f s: killed", place.slot.worker, pong.busy_s)
            place.process.kill()
