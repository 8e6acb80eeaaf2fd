"""The scheduler: events in, commands out; the part that all policies share.

Owns refusals, and workers that die, drain and retire.  Never chooses a worker: the policy does.
Pure: no I/O, no clock (`event.at_s` is the time), no randomness.  The same events give the same commands.

An impossible event (a known request arrives, a worker comes up twice) raises `IllegalTransition` and changes nothing.
An event that may come late or twice (a finish, the end of a move, a size) counts once.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from melld.errors import IllegalTransition
from melld.ids import WorkerId
from melld.scheduler import events
from melld.scheduler.cluster import Cluster, ClusterSettings
from melld.scheduler.events import AnyCommand, AnyEvent
from melld.scheduler.policy import Policy
from melld.scheduler.queueing import Queueing
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Duty, Request, RequestState, Worker


class SchedulerSettings(msgspec.Struct, frozen=True):
    """Settings of one model's scheduler.

    `max_waiting`: how many requests that have not begun may wait.  `wait_deadline_s`: how long each of them may wait
    (checked at epochs).  None: no limit.
    """

    cluster: ClusterSettings = ClusterSettings()
    max_waiting: int | None = None
    wait_deadline_s: float | None = None


class Scheduler:
    """A model's scheduler.  `policy` builds the policy object for the cluster that the scheduler owns."""

    def __init__(self, policy: Callable[[Cluster], Policy], settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self.cluster = Cluster(self.settings.cluster)
        self.policy = policy(self.cluster)
        self._queueing = Queueing(self.cluster, self.policy, self.settings.max_waiting, self.settings.wait_deadline_s)
        self.would_shed = self._queueing.would_shed
        self.known: dict[str, Any] | None = {}
        """What the decision log says of the last event besides its own fields; None: it was ignored."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.RequestArrived: self._arrived,
            events.RequestsGrew: self._grew,
            events.RequestFinished: self._finished,
            events.RequestPreempted: self._preempted,
            events.RequestResumed: self._noted,
            events.WorkerUp: self._worker_up,
            events.WorkerSteadied: self._worker_steadied,
            events.WorkerDown: self._worker_down,
            events.WorkerCapacityChanged: self._resized,
            events.WorkerSharingChanged: self._sharing_changed,
            events.WorkerSlotsChanged: self._resized,
            events.WorkerWakeTimeChanged: self._wake_time_changed,
            events.WorkersPaced: self._workers_paced,
            events.WorkerDraining: self._worker_draining,
            events.WorkerResumed: self._worker_resumed,
            events.MoveCommitted: self._move_ended,
            events.MoveAborted: self._move_ended,
            events.MoveAsked: self._move_asked,
            events.EpochStarted: self._epoch_started,
        }

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        """Handle one event; return the commands, to be applied in this order.

        Raises:
            IllegalTransition: the event contradicts what is known; nothing has changed.
            ValueError: the event's time is before the last one's, or a size is negative; nothing has changed.
        """
        cluster, now_s = self.cluster, event.at_s
        before_s = cluster.now_s
        if now_s < before_s:
            raise ValueError(f"time runs backwards: {now_s} after {before_s}")
        cluster.now_s, cluster.event, self.known = now_s, event.id, {}
        try:
            self._handlers[type(event)](event)
        except (IllegalTransition, ValueError):
            cluster.now_s = before_s
            raise
        return cluster.take_commands() if cluster.commands else []

    # ---- requests

    def _arrived(self, event: events.RequestArrived) -> None:
        if event.kv_bytes < 0:
            raise ValueError(f"request {event.request} of {event.kv_bytes} bytes")
        cluster = self.cluster
        request = cluster.add_request(event)
        if event.kv_bytes > (largest_bytes := cluster.roster.largest_capacity_bytes) and cluster.workers:
            cluster.remove_request(request)
            cluster.record(
                events.RefuseRequest(Reason.TOO_LARGE, request.id, event.kv_bytes, largest_bytes, cause=event.id)
            )
        elif cluster.waiting.requests:
            cluster.waiting.add(request)
            self._queueing.serve()
            self._queueing.tell(request)
            self._queueing.shed_surplus()
        elif not self._queueing.allocate(request, Reason.ARRIVAL):
            cluster.waiting.add(request)
            self._queueing.tell(request)
            self._queueing.shed_surplus()

    def _grew(self, event: events.RequestsGrew) -> None:
        self.cluster.grow(event.kv_bytes)
        self.policy.grew(event.kv_bytes)
        self._queueing.serve()

    def _finished(self, event: events.RequestFinished) -> None:
        request = self.cluster.requests.get(event.request)
        if request is None:
            self.known = None
            return
        destination = request.destination
        worker = self.cluster.remove_request(request)
        if worker is not None:
            self.policy.departed(request, worker, destination)
            self.policy.served(request, event)
        self._queueing.serve()  # also if nobody waits: room was perhaps kept for this one

    def _preempted(self, event: events.RequestPreempted) -> None:
        """Count the request in full, because it needs the bytes again to continue."""
        self._noted(event)
        request = self.cluster.requests.get(event.request)
        if request is not None and event.kv_bytes > request.kv_bytes:
            self._grew(events.RequestsGrew(event.at_s, {event.request: event.kv_bytes}))

    def _noted(self, event: events.RequestPreempted | events.RequestResumed) -> None:
        """Note the request's worker; a resumed request has always counted in full."""
        request = self.cluster.requests.get(event.request)
        worker = None if request is None else request.worker
        self.known = None if worker is None else {"worker": worker.id}

    def _move_ended(self, event: events.MoveCommitted | events.MoveAborted) -> None:
        request = self.cluster.requests.get(event.request)
        source, destination = (None, None) if request is None else (request.worker, request.destination)
        if request is None or source is None or destination is None or event.destination not in (None, destination.id):
            self.known = None
            return
        if type(event) is events.MoveCommitted:
            self.cluster.commit(request)
        else:
            self.cluster.abort(request)
            self._queueing.promises.aborted(request.id)
        self.policy.moved(request, source, destination)
        self._queueing.serve()

    def _move_asked(self, event: events.MoveAsked) -> None:
        """Move the request for an operator if there is room, else do nothing.

        The request is pinned: it stays until the worker drains or dies, or an operator moves it again.
        """
        request = self.cluster.requests.get(event.request)
        worker = self.cluster.workers.get(event.destination)
        if request is None or worker is None or request.state is not RequestState.RUNNING:
            return
        if request.worker is worker:
            if worker.state is Duty.ACTIVE:
                self.cluster.pin(request)
                self.policy.hold(request)
            return
        with self.cluster.last_resort():
            if worker.state is Duty.ASLEEP and worker.slots > 0 and request.kv_bytes <= worker.capacity_bytes:
                self.cluster.activate(worker, Reason.OPERATOR)
            if self.cluster.fits(worker, request.kv_bytes):
                self.cluster.pin(request)
                self.policy.send(request, worker, Reason.OPERATOR)
        self._queueing.serve()

    # ---- workers

    def _worker(self, name: WorkerId, event: str) -> Worker:
        worker = self.cluster.workers.get(name)
        if worker is None:
            raise IllegalTransition("worker", name, "unknown", event)
        return worker

    def _ignore_unknown(self, name: WorkerId) -> Worker | None:
        """Return the worker of an event that may come late; the log is not told of one that is gone."""
        worker = self.cluster.workers.get(name)
        self.known = {} if worker is not None else None
        return worker

    def _changed(self, worker: Worker) -> None:
        """Notify the policy, and place the requests that fit now."""
        self.policy.changed(worker)
        self._queueing.serve()

    def _worker_up(self, event: events.WorkerUp) -> None:
        if event.capacity_bytes < 0 or event.slots < 0:
            raise ValueError(f"worker {event.worker} of {event.capacity_bytes} bytes, {event.slots} slots")
        self._changed(self.cluster.add_worker(event))

    def _worker_steadied(self, event: events.WorkerSteadied) -> None:
        self._ignore_unknown(event.worker)
        worker = self.cluster.unsteady.get(event.worker)
        if worker is not None:
            self.cluster.steady_worker(worker)
            self._changed(worker)

    def _worker_down(self, event: events.WorkerDown) -> None:
        known = self.cluster.workers
        lost = dict.fromkeys(known[name] for name in event.workers if name in known)
        self.known = {"workers": [worker.id for worker in lost]}
        moves: dict[Request, tuple[Worker, Worker]] = {}
        for worker in lost:
            for request in (*worker.arriving.values(), *worker.requests.values()):
                if request.worker is not None and request.destination is not None:
                    moves[request] = request.worker, request.destination
        displaced = [request for worker in lost for request in self.cluster.remove_worker(worker)]
        for request, ends in moves.items():
            self.policy.moved(request, *ends)
        for worker in lost:
            self.policy.changed(worker)
        if lost:
            self._queueing.serve()
        for request in displaced:
            self._queueing.tell(request)

    def _resized(self, event: events.WorkerCapacityChanged | events.WorkerSlotsChanged) -> None:
        worker = self._ignore_unknown(event.worker)
        if worker is None:
            return
        capacity_bytes, slots = worker.capacity_bytes, worker.offered_slots
        if isinstance(event, events.WorkerCapacityChanged):
            capacity_bytes = event.capacity_bytes
        else:
            slots, self.known = event.slots, {"capacity_bytes": capacity_bytes}
        if capacity_bytes < 0 or slots < 0:
            raise ValueError(f"worker {worker.id} of {capacity_bytes} bytes, {slots} slots")
        self.cluster.resize_worker(worker, capacity_bytes, slots)
        self._changed(worker)

    def _sharing_changed(self, event: events.WorkerSharingChanged) -> None:
        if event.shared_bytes < 0:
            raise ValueError(f"worker {event.worker} shares {event.shared_bytes} bytes")
        worker = self._ignore_unknown(event.worker)
        if worker is not None and self.cluster.share(worker, event.shared_bytes):
            self._changed(worker)

    def _wake_time_changed(self, event: events.WorkerWakeTimeChanged) -> None:
        if event.wake_s < 0:
            raise ValueError(f"worker {event.worker} wakes in {event.wake_s} s")
        worker = self.cluster.workers.get(event.worker)
        if worker is not None:
            self.cluster.roster.wakes_in(worker, event.wake_s, event.at_s)

    def _workers_paced(self, event: events.WorkersPaced) -> None:
        known = self.cluster.workers
        self.policy.paced({known[name]: pace for name, pace in event.paces.items() if name in known})

    def _worker_draining(self, event: events.WorkerDraining) -> None:
        worker = self._worker(event.worker, "drain")
        self.cluster.drain_worker(worker)
        self._changed(worker)  # requests that only this worker could hold are now passed over
        self._empty_draining(worker)

    def _worker_resumed(self, event: events.WorkerResumed) -> None:
        worker = self._worker(event.worker, "resume")
        was = worker.state
        self.cluster.resume_worker(worker)
        if worker.state is not was:
            self._changed(worker)

    # ---- the epoch

    def _epoch_started(self, _event: events.EpochStarted) -> None:
        self.policy.epoch()
        self._queueing.serve()
        self._queueing.shed_late()
        for worker in self.cluster.draining.copy().values():
            self._empty_draining(worker)
        for worker in self.cluster.empty_workers():
            draining = worker.state is Duty.DRAINING
            if draining or self.policy.sleeps_in_s(worker) <= 0.0:
                self.cluster.retire(worker, Reason.DRAINED if draining else Reason.EMPTY)

    def _empty_draining(self, worker: Worker) -> None:
        """Move the worker's requests away, unless a waiting request that fits some worker must go first."""
        cluster = self.cluster
        smallest_bytes = min((one.kv_bytes for one in cluster.waiting.requests.values()), default=None)
        if smallest_bytes is not None and cluster.could_hold(smallest_bytes):
            return
        for request in list(worker.requests.values()):
            if request.state is RequestState.RUNNING:
                self.cluster.unpin(request)
                self._queueing.allocate(request, Reason.DRAIN)
