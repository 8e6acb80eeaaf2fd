"""Why things are as they are: who keeps a worker awake, what moves and what for, and what packing has saved.

Owns what the scheduler's causes were, and the shadow of best fit.  Hears every event and decision; changes nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from melld.control import status
from melld.control.status import LinkStatus, MoveStatus, MovingState
from melld.daemon.shadow import AwakeSeconds, Shadow
from melld.driver.drain import Drains, DrainState
from melld.driver.driver import Driver
from melld.engine.fleet.place import Place
from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.policies.mell.classes import Limits, T
from melld.scheduler.state import RequestState, Worker, WorkerState

SECONDS_PER_HOUR = 3600.0


class Because(NamedTuple):
    """A decision of the scheduler: when, and its word for why."""

    at_s: float
    cause: str


class Why:
    """The daemon's memory of causes."""

    def __init__(self, driver: Driver, drains: Drains, clock: Callable[[], float]) -> None:
        self._driver = driver
        self.drains = drains
        self._clock = clock
        self._switched: dict[WorkerId, Because] = {}
        """When each worker was last woken or put to sleep."""
        self.outlook: Callable[[WorkerId], str] = lambda _worker: ""
        """What becomes of a worker that is not needed."""
        self._moving: dict[RequestId, Because] = {}
        self._awake = AwakeSeconds()
        self._shadow = Shadow(driver.scheduler.settings)
        driver.taps.append(self._heard)

    # -- workers -----------------------------------------------------------------------------------------------------

    def size_class(self, worker: WorkerId) -> str | None:
        """The class of its largest request, in MELL's letters; None without requests."""
        known = self._driver.scheduler.cluster.workers.get(worker)
        if known is None or not known.requests or not known.capacity_bytes:
            return None
        largest_bytes = max(request.kv_bytes for request in known.requests.values())
        return max(Limits.of(known.capacity_bytes).class_of(largest_bytes), T).name

    def why(self, place: Place) -> str:
        """Why the worker is awake, or is not; empty while it is not known to the scheduler for other reasons."""
        worker = place.slot.worker
        drain = self.drains.by_worker.get(worker)
        known = self._driver.scheduler.cluster.workers.get(worker)
        if drain is not None and drain.state is not DrainState.DRAINING:
            drained = drain.state is DrainState.DRAINED
            return f"drained: `melld resume {worker}` starts it" if drained else "draining: its process ends"
        if known is None:
            return place.process.doing if place.process is not None else ""
        match known.state:
            case WorkerState.DRAINING | WorkerState.WITHDRAWN:
                return f"draining: {_requests(len(known.requests))} left"
            case WorkerState.ASLEEP:
                return f"not needed{self._since(worker)}; {self._wakes(place)}"
        if known.count:
            coming = f", {len(known.arriving)} on their way here" if known.arriving else ""
            return f"{_requests(len(known.requests))}{coming}; awake{self._since(worker)}"
        return f"idle: {self._idle(known)}"

    def _wakes(self, place: Place) -> str:
        """How long a request would wait for it, as it stands now."""
        match place.state:
            case status.WorkerState.WAKING:
                return "wakes"
            case status.WorkerState.STOPPING | status.WorkerState.STOPPED:
                return f"wakes in about {place.wake_s:.1f} s" if place.wake_s else "starts when it is needed"
        return "; ".join(filter(None, ("wakes at once", self.outlook(place.slot.worker))))

    def _since(self, worker: WorkerId) -> str:
        because = self._switched.get(worker)
        return f" for {self._clock() - because.at_s:.0f} s ({because.cause})" if because is not None else ""

    def _idle(self, worker: Worker) -> str:
        left_s = self._driver.scheduler.settings.retire_after_s - (self._clock() - worker.empty_since_s)
        return f"sleeps in {max(left_s, 0.0):.0f} s"

    # -- moves -------------------------------------------------------------------------------------------------------

    def moves(self) -> tuple[MoveStatus, ...]:
        """Those that the scheduler has decided on and that are not over, in the order in which it did."""
        requests = self._driver.scheduler.cluster.requests
        moving = [requests[name] for name in self._moving if name in requests]
        return tuple(
            self._move(request.id, request.worker.id, request.destination.id, request.kv_bytes)
            for request in moving
            if request.state is RequestState.MOVING and request.worker and request.destination
        )

    def _move(self, request: RequestId, source: WorkerId, destination: WorkerId, kv_bytes: int) -> MoveStatus:
        because = self._moving[request]
        waits = self._driver.why_deferred(request)
        migration = self._driver.migration_of(request)
        return MoveStatus(
            request=request,
            source=source,
            destination=destination,
            state=MovingState.DEFERRED if waits else MovingState.RUNNING,
            via=None if waits or migration is None else str(migration.via),
            kv_bytes=kv_bytes,
            cause=because.cause,
            deferred_because=waits,
            age_s=round(max(self._clock() - because.at_s, 0.0), 3),
        )

    def links(self) -> tuple[LinkStatus, ...]:
        """How requests go from each worker to each other one."""
        return tuple(
            LinkStatus(
                source=source,
                destination=destination,
                transport=link.transport or None,
                bytes_per_s=round(link.bytes_per_s) or None,
                tokens_only_because=link.failure,
            )
            for (source, destination), link in self._driver.links.items()
        )

    # -- savings -----------------------------------------------------------------------------------------------------

    @property
    def worker_seconds_awake(self) -> float:
        """Of all workers, since the start."""
        return self._awake.until(self._clock())

    @property
    def shadow_worker_seconds_awake(self) -> float:
        """What best fit without migration would have needed."""
        return self._shadow.awake.until(self._clock())

    @property
    def gpu_hours_saved(self) -> float:
        """The difference, in hours."""
        return (self.shadow_worker_seconds_awake - self.worker_seconds_awake) / SECONDS_PER_HOUR

    @property
    def shadow_preemptions(self) -> int:
        """What best fit would have had to push out."""
        return self._shadow.preemptions

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _heard(self, event: events.AnyEvent, commands: Sequence[events.AnyCommand]) -> None:
        match event:
            case events.MoveCommitted() | events.MoveAborted() | events.RequestFinished():
                self._forget_ended(event.request)
            case events.WorkerDown():
                self._switched.pop(event.worker, None)
        for command in commands:
            match command:
                case events.ActivateWorker() | events.RetireWorker():
                    self._switched[command.worker] = Because(event.at_s, command.reason)
                case events.MoveRequest():
                    self._moving[command.request] = Because(event.at_s, command.reason)
        self._awake.note(self._driver.scheduler.cluster)
        self._shadow.hear(event)

    def _forget_ended(self, name: RequestId) -> None:
        """A late word of an earlier move ends nothing."""
        request = self._driver.scheduler.cluster.requests.get(name)
        if request is None or request.state is not RequestState.MOVING:
            self._moving.pop(name, None)


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
