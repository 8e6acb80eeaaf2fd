"""Keeps one worker process per device running: starts, stops and wakes workers, restarts dead ones, kills hung ones.

Owns the processes.  Knows no requests: the fleet does.  `place` has the lifecycle, `restarts` the rests.

    a worker dies                    restarted after 1, 2, 4 ... 60 s, until it has run for `steady_after_s`
    it dies while loading, in a row  given up after `MAX_FAILED_STARTS`
    it hangs                         killed (`hung`)
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from melld.config import HealthConfig
from melld.control.status import WorkerState
from melld.engine.fleet.dozing import Dozing
from melld.engine.fleet.first_start import FirstStart, WorkerStartFailed
from melld.engine.fleet.hung import HungWorkers
from melld.engine.fleet.place import Place, Slot
from melld.engine.fleet.ports import WorkerListener, WorkerOwner
from melld.engine.fleet.process import WorkerEnded, WorkerProcess
from melld.engine.fleet.restarts import Restarts
from melld.engine.host.intake import Intake
from melld.engine.host.ports import Host
from melld.engine.wire import messages as wire
from melld.ids import WorkerId

log = logging.getLogger("melld.supervisor")
STOP_DEADLINE_S = 5.0


class Supervisor:
    """All workers, each in its place.

    With an `owner`, which says which workers run, it starts none by itself.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        host: Host,
        listener: WorkerListener,
        health: HealthConfig,
        owner: WorkerOwner | None = None,
        intake: Intake | None = None,
    ) -> None:
        self.places: dict[WorkerId, Place] = {}
        self._hosts: dict[WorkerId, Host] = {}
        self._is_started = False
        self._listener = listener
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()
        self._stopping = False
        self.owner = owner
        self._first = FirstStart(self.places.values())
        self._hung = HungWorkers(self.places.values(), health)
        self.dozing = Dozing(listener, self.stop_worker)
        self.restarts = Restarts(self._spawn, self._own, listener, health.steady_after_s)
        self._intake = intake or Intake()
        self.add(slots, host)

    async def start(self, on_ready: Callable[[Place], None] = lambda _: None) -> None:
        """Start every worker; return when each is ready or has failed once (those are restarted), and one is ready.

        Until then, call `on_ready` for each worker that becomes ready.

        Raises:
            WorkerStartFailed: no worker became ready; all have been stopped.
        """
        self._is_started = True
        try:
            with self._first.told(on_ready) as over:
                for place in list(self.places.values()):
                    self._spawn(place)
                await over
        except WorkerStartFailed:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every worker; return when none is left."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*[self._end(place) for place in self.places.values() if place.process is not None])

    # -- machines ---------------------------------------------------------------------------------------------------

    def add(self, slots: Sequence[Slot], host: Host) -> None:
        """Make places on this host; start their workers if the others have been started."""
        for slot in slots:
            place = self.places[slot.worker] = Place(slot)
            self._hosts[slot.worker] = host
            if self.owner is not None:
                place.is_owned = True
                place.state = WorkerState.STOPPED
            elif self._is_started:
                self._spawn(place)

    @contextlib.contextmanager
    def losing(self, workers: Iterable[WorkerId], why: str) -> Iterator[None]:
        """Start none of these workers until `bring_back`: their machine is lost, and the block ends their processes.

        Count those as dead, too, that had no process, unless an operator wants none.
        """
        places = [self.places[worker] for worker in workers]
        for place in places:
            place.is_away = True
        yield
        for place in places:
            if place.may("died") and not place.stays_out:
                place.died(was_ready=True)
                place.detail = why

    def bring_back(self, workers: Iterable[WorkerId], host: Host) -> None:
        """Start these workers again: their machine is back, as this host."""
        for place in (self.places[worker] for worker in workers):
            self._hosts[place.slot.worker] = host
            place.is_away = False
            place.forgive()
            if place.state is WorkerState.FAILED and self._is_started:
                self.restarts.restart(place)
            elif not place.stays_out:  # an operator has resumed it meanwhile
                self._begin(place, "start")

    # -- one worker, on purpose -------------------------------------------------------------------------------------

    def start_worker(self, worker: WorkerId) -> None:
        """Begin to start a worker that was stopped, is being stopped, or was given up; ignore any other."""
        self.places[worker].stays_out = False
        self._begin(self.places[worker], "start")

    def load(self, worker: WorkerId) -> bool:
        """Start a worker for its owner, after a death once it has rested; return False if an operator keeps it out."""
        place = self.places[worker]
        event, dozes = "retry" if place.state is WorkerState.FAILED else "wake", place.state is WorkerState.DOZING
        if self._stopping or not place.may(event) or place.obstacle:
            return place.state in (WorkerState.STARTING, WorkerState.WAKING)
        if event == "retry":
            place.restarts += 1
        place.step(event)
        if place.process is None:
            self._own(place, self.restarts.start_rested(place))
        elif dozes:
            place.process.wake()
        return True

    def doze(self, worker: WorkerId) -> None:
        """Have a worker doze for its owner."""
        self.dozing.ask(self.places[worker])

    def stop_worker(self, worker: WorkerId, *, stay_out: bool = False) -> None:
        """End a worker's process in an orderly way, and keep it stopped until `start_worker` or `wake`.

        Returns at once, and the worker is no longer ready; the listener hears of an expected `WorkerEnded`.
        `stay_out`: an operator asked for it; only `start_worker` ends that.
        """
        place = self.places[worker]
        place.stays_out |= stay_out
        if not place.may("stop"):
            return
        place.detail = ""
        if place.process is not None:
            self._own(place, self._end(place))
            return
        place.step("stop")
        if place.may("ended"):  # it was about to be started
            place.step("ended")
            if self.owner is not None:
                self.owner.worker_ended(worker, WorkerEnded(worker, "stopped before its start", expected=True))

    def sleep(self, worker: WorkerId) -> None:
        """Mark a ready worker as asleep.  Its process stays as it is until `stop_worker`."""
        if (place := self.places[worker]).may("sleep"):
            place.step("sleep")

    def wake(self, worker: WorkerId) -> None:
        """Wake a sleeping or stopped worker: at once if its process is warm, else by starting it."""
        self._begin(self.places[worker], "wake")

    def process(self, worker: WorkerId) -> WorkerProcess | None:
        """Return the worker's process if it is ready."""
        return place.process if (place := self.places[worker]).is_ready else None

    def _begin(self, place: Place, event: str) -> None:
        """Bring a worker back if the table allows this event; one without a process only if it has no owner."""
        if not place.may(event) or place.is_away or (self._stopping and not place.is_ready):
            return
        if self.owner is not None and not place.is_ready:
            self.owner.wanted(place.slot.worker)
            return
        was_given_up = place.given_up
        place.step(event)
        if was_given_up:
            place.forgive()
        if not place.is_ready and place.process is None:
            self._spawn(place)

    def _end(self, place: Place) -> Coroutine[Any, Any, None]:
        """Ask a process to end; kill one that is still loading, which has nothing to clean up."""
        assert place.process is not None
        is_loading = not (place.is_ready or place.process.asked_to_end)
        if place.may("stop"):
            place.step("stop")
        return place.process.stop(0.0 if is_loading else STOP_DEADLINE_S)

    def _own(self, place: Place, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that starts or stops this worker."""
        self._tasks.add(task := asyncio.get_running_loop().create_task(work, name=f"{place.state} {place.slot.worker}"))
        task.add_done_callback(partial(self._task_ended, place))

    def _task_ended(self, place: Place, task: asyncio.Task[None]) -> None:
        """Count a worker whose task has failed, which is a bug in melld, as dead, so that it is started again."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._failures.put_nowait(error)
        why = f"a bug in melld: {type(error).__name__}: {error}"
        if place.process is not None:
            place.process.kill(why)
        elif place.state in (WorkerState.STARTING, WorkerState.WAKING):
            self._ended(place, WorkerEnded(place.slot.worker, why, expected=False))

    def _spawn(self, place: Place) -> None:
        if place.process is not None or place.state not in (WorkerState.STARTING, WorkerState.WAKING):
            return  # no longer wanted, or started meanwhile
        place.unanswered = 0
        try:
            host, hear = self._hosts[place.slot.worker], (partial(self._said, place), partial(self._ended, place))
            place.process = WorkerProcess(place.slot.spec, host, *hear, self._intake)
        except OSError as error:  # out of file descriptors or memory: that may pass
            reason = f"no process could be started: {error}"
            self._ended(place, WorkerEnded(place.slot.worker, reason, expected=False))

    def _said(self, place: Place, message: Any, payload: list[bytes]) -> None:
        place.unanswered = 0
        match message:
            case wire.Pong():
                self._hung.judge_step(place, message)
            case wire.Dozed():
                self.dozing.answered(place, message)
            case wire.WorkerReady():
                if place.process is not None and not place.process.asked_to_end:
                    self._ready(place, message, place.process)
            case _:
                self._listener.worker_said(place.slot, message, payload)

    def _ready(self, place: Place, message: wire.WorkerReady, process: WorkerProcess) -> None:
        place.step("ready")
        place.failed_starts = 0
        place.detail = ""
        place.wake_s = asyncio.get_running_loop().time() - process.began_s
        self.restarts.ready(place)
        level = logging.INFO if place.has_been_ready else logging.DEBUG  # the daemon reports the first start
        text = "%s is ready on %s (pid %d, %.1f s)"
        log.log(level, text, place.slot.worker, place.slot.device, process.pid, message.load_s)
        is_first = not self._first.anybody_was_ready
        place.has_been_ready = True
        # Now it is known that the model can be served.
        for failed in self.places.values() if is_first and self.owner is None else ():
            if failed.state is WorkerState.FAILED:
                self.restarts.restart(failed)
        self._listener.worker_said(place.slot, message, [])
        self._first.became_ready(place)

    def _ended(self, place: Place, ended: WorkerEnded) -> None:
        place.process = None
        self.restarts.forget(place.slot.worker)
        if ended.expected:
            place.step("ended")
        else:
            self.restarts.died(place, ended.reason)
            self._first.failed(WorkerStartFailed(ended.worker, place.slot.device, ended.reason))
            log.error("%s on %s is gone: %s", ended.worker, place.slot.device, ended.reason)
        self._listener.worker_ended(place.slot, ended)
        self._first.check()
        if self.owner is not None:
            self.owner.worker_ended(place.slot.worker, ended)
        elif not self._stopping and place.state is WorkerState.FAILED and self._first.anybody_was_ready:
            self.restarts.restart(place)
        if not self._stopping and place.state is WorkerState.WAKING:
            self._spawn(place)

    async def watch(self) -> None:
        """Kill hung workers, until cancelled.

        Raises:
            Exception: a task of the supervisor has failed with it.
        """
        while True:
            try:
                error = await asyncio.wait_for(self._failures.get(), self._hung.interval_s)
            except TimeoutError:
                self._hung.look()
            else:
                raise error
