"""Drains: empties and stops a worker whose device an operator needs, and returns it to service on request.

Owns the drains under way and those that are done, which keep their workers out of service until `resume`.  Never moves
a request: the scheduler does, after `WorkerDraining`.  Never ends a process: the supervisor does.

    drain ──► DRAINING ──empty, or its worker died, or the deadline──► STOPPING ──► DRAINED
                 │  ▲ a request that no other worker could ever hold: at the deadline it is reported, the drain goes on
                 └──────────────── resume, from any of them ────────────────► back in service
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from melld.control.messages import Drained, DrainOutcome, Lend, Resumed
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.life import Intent, Who
from melld.engine.fleet.place import Place
from melld.engine.fleet.process import WorkerProcess
from melld.errors import MelldError
from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.roster import OPEN_STATES
from melld.scheduler.state import Duty
from melld.scheduler.view import ClusterView

log = logging.getLogger("melld.drain")


class LastWorker(MelldError):
    """The worker cannot be drained: without it no request would be served."""

    status = 409
    code = "last_worker"

    def __init__(self, worker: str, others: Sequence[str]) -> None:
        rest = f" ({'; '.join(others)})" if others else ""
        super().__init__(
            f"{worker} is the last worker in service{rest} and cannot be drained: "
            "resume another one first, or stop the daemon"
        )


class WorkerLent(MelldError):
    """The worker's device is another program's for now."""

    status = 409
    code = "worker_lent"

    def __init__(self, worker: str, loan: Lend) -> None:
        super().__init__(f"{worker} is lent to {loan.borrower} and returns to service when that exits: kill {loan.pid}")


class WorkerDrain:
    """A worker's drain and the fate of the requests that were there."""

    def __init__(self, place: Place, began_s: float, loan: Lend | None = None) -> None:
        self.place = place
        self.worker = place.slot.worker
        place.life.wish(Who.OPERATOR, Intent.DRAINING)
        self.loan = loan
        """Who gets the device, and gives it back; None: an operator's drain."""
        self.began_s = began_s
        self.total_s: float | None = None
        """None until the worker has ended."""
        self.left: set[RequestId] = set()
        self.moved = 0
        self.ended = 0
        self.restarted = 0
        self.stuck = ""
        self.resumed = False
        self.answer = asyncio.Event()
        """Set when waiting callers get their answer: drained, stuck at the deadline, or resumed."""
        self.deadline: asyncio.TimerHandle | None = None
        self.stopping: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Return whether the worker has ended."""
        return self.total_s is not None

    @property
    def is_emptying(self) -> bool:
        """Return whether its requests still leave; afterwards its process ends."""
        return self.place.life.wished_by(Who.OPERATOR) is Intent.DRAINING

    def report(self, now_s: float) -> Drained:
        """Return the drain's progress."""
        outcome = DrainOutcome.DRAINED if self.is_over else DrainOutcome.DRAINING
        if self.resumed:
            outcome = DrainOutcome.RESUMED
        elif self.stuck:
            outcome = DrainOutcome.STUCK
        return Drained(
            worker=self.worker,
            outcome=outcome,
            total_s=round(now_s - self.began_s if self.total_s is None else self.total_s, 3),
            moved=self.moved,
            ended=self.ended,
            restarted=self.restarted,
            left=len(self.left),
            reason=self.stuck,
        )


class Drains:
    """All drains of one fleet."""

    def __init__(
        self,
        fleet: Fleet,
        cluster: ClusterView,
        clock: Callable[[], float],
        tell: Callable[[events.AnyEvent], None],
    ) -> None:
        self.by_worker: dict[WorkerId, WorkerDrain] = {}
        self.fleet = fleet
        self.cluster = cluster
        self._clock = clock
        self._tell = tell

    async def drain(self, worker: WorkerId, wait: bool, deadline_s: float | None) -> Drained:
        """Take the worker out of service and return the drain's progress; a repeated call returns it again.

        Raises:
            UnknownWorker: no worker has that name.
            LastWorker: no other worker takes requests.
            WorkerLent: its device is lent.
        """
        place = self.fleet.place_of(worker)
        drain = self.by_worker.get(worker)
        if drain is None:
            self._refuse_last(worker)
            drain = self._begin(place)
        elif drain.loan is not None:
            raise WorkerLent(worker, drain.loan)
        if deadline_s is not None and drain.is_emptying:
            if drain.deadline is not None:
                drain.deadline.cancel()
            drain.stuck = ""
            drain.answer.clear()
            drain.deadline = asyncio.get_running_loop().call_later(deadline_s, self._force, drain)
        if wait:
            await drain.answer.wait()
        return drain.report(self._clock())

    async def drain_all(self, workers: Sequence[WorkerId], wait: bool, deadline_s: float | None) -> list[Drained]:
        """Take these workers out of service together, so that no request moves from one of them to another.

        Raises:
            LastWorker: no other worker takes requests; drains begun here are undone.
        """
        begun: list[WorkerId] = []
        try:
            for worker in workers:
                if worker not in self.by_worker:
                    await self.drain(worker, False, deadline_s)
                    begun.append(worker)
        except LastWorker:
            for worker in begun:
                await self.resume(worker)
            raise
        return list(await asyncio.gather(*(self.drain(worker, wait, deadline_s) for worker in workers)))

    def lend(self, worker: WorkerId, loan: Lend) -> WorkerDrain:
        """Take the worker, even the last, out of service for a borrower; only that loan's end resumes it."""
        return self._begin(self.fleet.place_of(worker), loan)

    async def resume(self, worker: WorkerId, loan: Lend | None = None) -> Resumed:
        """Take the worker into service again and start its process if there is none.  `loan`: which that ends.

        Raises:
            UnknownWorker: no worker has that name.
            WorkerLent: its device is lent.
        """
        place = self.fleet.place_of(worker)
        drain = self.by_worker.get(worker)
        if drain is not None and drain.loan is not loan and drain.loan is not None:
            raise WorkerLent(worker, drain.loan)
        self.by_worker.pop(worker, None)
        if drain is not None:
            if drain.deadline is not None:
                drain.deadline.cancel()
            drain.resumed = not drain.is_over
            drain.answer.set()
            if drain.stopping is not None:
                await drain.stopping
        if worker in self.by_worker:  # drained again meanwhile
            return Resumed(worker=worker, was_drained=True, started=False)
        if worker in self.cluster.workers and place.life.wished_by(Who.LANDLORD) is Intent.IN_SERVICE:
            self._tell(events.WorkerResumed(self._clock(), worker=worker))
        started = place.process is None
        self.fleet.supervisor.start_worker(worker)
        if drain is not None or started:
            log.info("%s is back in service", worker)
        return Resumed(worker=worker, was_drained=drain is not None, started=started)

    async def close(self) -> None:
        """Cancel all tasks and timers: the daemon ends."""
        tasks = [drain.stopping for drain in self.by_worker.values() if drain.stopping is not None]
        for drain in self.by_worker.values():
            if drain.deadline is not None:
                drain.deadline.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- steps of a drain --------------------------------------------------------------------------------------------

    def _begin(self, place: Place, loan: Lend | None = None) -> WorkerDrain:
        worker, lent_to = place.slot.worker, loan.borrower if loan is not None else ""
        drain = self.by_worker[worker] = WorkerDrain(place, self._clock(), loan)
        drain.left = {live.request for live in self.fleet.live.values() if live.worker == worker}
        whose = f", to be lent to {lent_to}" if lent_to else ""
        log.info("draining %s with %d requests%s", worker, len(drain.left), whose)
        if not self.fleet.is_ready(worker):  # none of its requests has started
            self.fleet.withdraw(worker)
        elif worker in self.cluster.workers:
            self._tell(events.WorkerDraining(self._clock(), worker=worker, lent_to=lent_to))
        self._stop_if_empty(drain)
        return drain

    def _refuse_last(self, worker: WorkerId) -> None:
        known, others = self.cluster.workers, []
        for place in self.fleet.places.values():
            other = place.slot.worker
            if other == worker:
                continue
            there = known.get(other)
            if there is not None and there.state in OPEN_STATES and there.offered_slots > 0:
                return
            drain = self.by_worker.get(other)
            others.append(f"{other}: {drain.report(self._clock()).outcome if drain else place.detail or 'starting'}")
        raise LastWorker(worker, others)

    def heard(self, event: events.AnyEvent) -> None:
        """Follow the drains under way after an event has been handled."""
        for drain in self.by_worker.values():
            if not drain.is_over:
                self._note(drain, event)

    def _note(self, drain: WorkerDrain, event: events.AnyEvent) -> None:
        match event:
            case events.MoveCommitted(request=request) if request in drain.left:
                if event.destination != drain.worker:
                    drain.left.remove(request)
                    drain.moved += 1
            case events.MoveCommitted(destination=destination) if destination == drain.worker:
                drain.left.add(event.request)  # it was on its way here when the drain began
            case events.RequestFinished(request=request) if request in drain.left:
                drain.left.remove(request)
                drain.ended += 1
            case events.WorkerDown() if drain.worker in event.workers:
                drain.restarted += len(drain.left)
                drain.left.clear()
            case events.EpochStarted():
                pass
            case _:
                return
        self._stop_if_empty(drain)

    def _stop_if_empty(self, drain: WorkerDrain) -> None:
        """Stop the worker once the scheduler has withdrawn it, or if the scheduler does not know it."""
        worker = self.cluster.workers.get(drain.worker)
        if drain.is_emptying and (worker is None or worker.state is Duty.WITHDRAWN):
            self._stop(drain)

    def _force(self, drain: WorkerDrain) -> None:
        """Stop the worker at the deadline: the requests left resume elsewhere from their tokens, as after its death.

        Without room now, they wait ahead of others.  If no other worker could ever hold one of them, nothing is
        forced, as it would wait for ever.
        """
        if not drain.is_emptying:
            return
        requests = self.cluster.requests
        known = [requests[name] for name in drain.left if name in requests]
        too_large = [one for one in known if not self.cluster.could_hold(one.kv_bytes)]
        if too_large:
            drain.stuck = f"no other worker could hold {', '.join(sorted(one.id for one in too_large))}"
            log.warning("drain of %s: not empty at the deadline, continuing: %s", drain.worker, drain.stuck)
            drain.answer.set()
        else:
            self._stop(drain)

    def _stop(self, drain: WorkerDrain) -> None:
        if drain.deadline is not None:
            drain.deadline.cancel()
        drain.stuck = ""
        process = drain.place.process
        self.fleet.stop_worker(drain.worker, stay_out=True)
        ending = self._wait_ended(drain, process)
        drain.stopping = asyncio.get_running_loop().create_task(ending, name=f"drain {drain.worker}")

    async def _wait_ended(self, drain: WorkerDrain, process: WorkerProcess | None) -> None:
        if process is not None:
            await process.wait_ended()
        drain.total_s = self._clock() - drain.began_s
        drain.answer.set()
        log.info("%s", drain.report(self._clock()).in_words())
