"""Keeps one worker process alive per device: starts them side by side, restarts the dead, fences the hung.

Owns the processes and their back-off.  Never knows a request: the fleet does.

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
from melld.errors import MelldError
from melld.ids import WorkerId

log = logging.getLogger("melld.supervisor")
MAX_FAILED_STARTS = 5
MAX_BACK_OFF_S = 60.0
PING_INTERVAL_S = 1.0
STOP_DEADLINE_S = 5.0


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A place for a worker: its name, its device, and what it is told at birth."""

    worker: WorkerId
    device: str
    uuid: str | None = None
    spec: wire.WorkerSpec


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


class Place:
    """A slot and the process that is in it now."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.process: WorkerProcess | None = None
        self.restarts = 0
        self.failed_starts = 0
        self.detail = ""
        self.given_up = False
        self.wanted = True
        self.heard_s = 0.0
        self.unanswered = 0

    @property
    def is_ready(self) -> bool:
        """Whether a worker is there and takes requests."""
        return self.process is not None and self.process.state is ProcessState.READY

    @property
    def back_off_s(self) -> float:
        """How long to wait before the next start."""
        return min(MAX_BACK_OFF_S, 2.0 ** max(0, self.failed_starts - 1))


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
        await asyncio.gather(*(process.stop(STOP_DEADLINE_S) for process in processes))
        self.template.stop()

    def process(self, worker: WorkerId) -> WorkerProcess | None:
        """The process in that place if it is ready."""
        place = self.places[worker]
        return place.process if place.is_ready else None

    def _own(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _spawn(self, place: Place) -> None:
        slot = place.slot
        place.process = WorkerProcess(
            slot.spec,
            self.template,
            lambda message, payload: self._said(place, message, payload),
            lambda ended: self._ended(place, ended),
        )
        place.unanswered = 0
        await place.process.start()
        self.on_change()

    def _said(self, place: Place, message: Any, payload: list[bytes]) -> None:
        place.unanswered = 0
        if isinstance(message, wire.Pong):
            self._judge_step(place, message)
            return
        if isinstance(message, wire.WorkerReady):
            place.failed_starts = 0
            place.detail = ""
            log.info(
                "%s is ready on %s (pid %d, %.1f s)", place.slot.worker, place.slot.device, message.pid, message.load_s
            )
        self._listener.worker_said(place.slot, message, payload)
        if isinstance(message, wire.WorkerReady):
            self._check_first_start()
            self.on_change()

    def _ended(self, place: Place, ended: WorkerEnded) -> None:
        place.process = None
        place.detail = ended.reason
        if not ended.expected:
            log.error("%s on %s is gone: %s", ended.worker, place.slot.device, ended.reason)
        self._listener.worker_ended(place.slot, ended)
        if self._first_start is not None and not self._first_start.done() and not ended.expected:
            self._first_start.set_exception(WorkerStartFailed(ended.worker, place.slot.device, ended.reason))
        elif not self._stopping and place.wanted:
            self._restart(place, ended)
        self.on_change()

    def _check_first_start(self) -> None:
        waiting = self._first_start
        if waiting is not None and not waiting.done() and all(place.is_ready for place in self.places.values()):
            waiting.set_result(None)

    def _restart(self, place: Place, ended: WorkerEnded) -> None:
        if not ended.expected:
            place.failed_starts = place.failed_starts + 1 if not ended.was_ready else 1
        if place.failed_starts >= MAX_FAILED_STARTS:
            place.given_up = True
            place.detail = f"given up after {place.failed_starts} failed starts: {ended.reason}"
            log.error("%s: %s", place.slot.worker, place.detail)
            return
        place.restarts += 1
        self._own(self._start_again(place), f"restart {place.slot.worker}")

    async def _start_again(self, place: Place) -> None:
        await asyncio.sleep(place.back_off_s)
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
