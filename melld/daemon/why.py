"""Says why workers are awake or asleep and why requests move, for the status."""

from collections.abc import Callable

from melld.control import status
from melld.control.status import LinkStatus, MoveStatus, MovingState
from melld.daemon.history import History
from melld.driver.driver import Driver
from melld.driver.idle import IdleWorkers
from melld.engine.fleet.place import Place
from melld.ids import WorkerId
from melld.migrate.wish import Wish
from melld.scheduler.policies.mell.classes import Limits, T
from melld.scheduler.roles import Role
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.state import Duty, Worker
from melld.scheduler.view import ClusterView

UNLOADED = (status.WorkerState.DOZING, status.WorkerState.STOPPING, status.WorkerState.STOPPED)
LONG_S = 1e8
"""An end that is further away is not told."""


class Explainer:
    """The reasons for the states of workers and moves."""

    def __init__(
        self,
        scheduler: Scheduler,
        driver: Driver,
        history: History,
        idle: IdleWorkers,
        clock: Callable[[], float],
    ) -> None:
        self._cluster: ClusterView = scheduler.cluster
        self._policy = scheduler.policy
        self._driver = driver
        self._history = history
        self._idle_workers = idle
        self._clock = clock

    # -- workers -----------------------------------------------------------------------------------------------------

    def size_class(self, worker: WorkerId) -> str | None:
        """Return the class of the worker's largest request, in MELL's letters; None without requests."""
        known = self._cluster.workers.get(worker)
        if known is None or not known.requests or not known.capacity_bytes:
            return None
        largest_bytes = max(request.kv_bytes for request in known.requests.values())
        return max(Limits.of(known.capacity_bytes).class_of(largest_bytes), T).name

    def promised_bytes(self, worker: WorkerId) -> int:
        """Return how much of the worker's KV is reserved for a waiting request."""
        known = self._cluster.workers.get(worker)
        return known.promised_bytes if known is not None else 0

    def freeness_s(self, worker: WorkerId) -> float | None:
        """Return how long the worker's free KV will last; None without requests, or before they have grown."""
        known = self._cluster.workers.get(worker)
        if known is None or not known.count or not known.growth_bytes_s:
            return None
        return round((known.settled_free_bytes - known.promised_bytes) / (known.count * known.growth_bytes_s), 3)

    def why(self, place: Place) -> str:
        """Say why the worker is awake or asleep; empty if the scheduler does not know it."""
        worker = place.slot.worker
        drain = self._driver.drains.by_worker.get(worker)
        known = self._cluster.workers.get(worker)
        if drain is not None and drain.loan is not None:
            left = _requests(len(drain.left)) if drain.is_emptying else "its process"
            return f"{'lent' if drain.is_over else f'draining: {left} left; to be lent'} to {drain.loan.borrower}"
        if drain is not None and not drain.is_emptying:
            return (
                f"drained: `melld resume {worker}` starts it" if drain.is_over else "draining: its process is exiting"
            )
        if known is None:
            return place.loading
        if place.unloaded_because and place.state in UNLOADED:  # which the scheduler hears a little later
            return f"not loaded ({place.unloaded_because}); {self._wakes(place)}"
        match known.state:
            case Duty.DRAINING | Duty.WITHDRAWN:
                return f"draining: {_requests(len(known.requests))} left"
            case Duty.ASLEEP:
                return f"not needed{self._since(worker)}; {self._wakes(place)}"
        if known.count:
            coming = f", {len(known.arriving)} incoming" if known.arriving else ""
            return f"{_requests(len(known.requests))}{coming}; awake{self._since(worker)}"
        return f"idle: {self._idle(known)}"

    def role(self, worker: WorkerId) -> Role:
        """Return the worker's role."""
        known = self._cluster.workers.get(worker)
        return Role.MIXED if known is None else self._policy.role_of(known)

    def roles(self) -> str:
        """Say why the workers have their roles."""
        return self._policy.roles_because()

    def _wakes(self, place: Place) -> str:
        """Say how long a request would wait for the worker to wake."""
        match place.state:
            case status.WorkerState.WAKING:
                return "waking"
            case state if state in UNLOADED:
                return f"wakes in about {place.wake_s:.1f} s" if place.wake_s else "starts when needed"
        return "; ".join(filter(None, ("wakes instantly", self._idle_workers.outlook(place.slot.worker))))

    def _since(self, worker: WorkerId) -> str:
        because = self._history.switched.get(worker)
        return f" for {self._clock() - because.at_s:.0f} s ({because.cause})" if because is not None else ""

    def _idle(self, worker: Worker) -> str:
        left_s = self._policy.sleeps_in_s(worker) - (self._clock() - self._cluster.now_s)
        return f"sleeps in {max(left_s, 0.0):.0f} s" if left_s < LONG_S else "kept awake"

    # -- moves -------------------------------------------------------------------------------------------------------

    def moves(self) -> tuple[MoveStatus, ...]:
        """Return the unfinished moves, in the order of their decisions."""
        return tuple(map(self._move, self._driver.wanted.unfinished()))

    def _move(self, wish: Wish) -> MoveStatus:
        waits = self._driver.wanted.why_deferred(wish.request)
        migration = self._driver.migration_of(wish.request)
        known = self._cluster.requests.get(wish.request)
        return MoveStatus(
            request=wish.request,
            source=wish.source,
            destination=wish.destination,
            state=MovingState.DEFERRED if waits else MovingState.RUNNING,
            via=None if waits or migration is None else str(migration.via),
            kv_bytes=known.kv_bytes if known is not None else wish.kv_bytes,
            cause=wish.reason,
            deferred_because=waits,
            age_s=round(self._clock() - wish.since_s, 3),
        )

    def links(self) -> tuple[LinkStatus, ...]:
        """Return how requests move from each worker to each other one."""
        return tuple(
            LinkStatus(
                source=source,
                destination=destination,
                transport=link.transport or None,
                bytes_per_s=round(link.bytes_per_s) or None,
                tokens_only_because=link.failure,
            )
            for (source, destination), link in self._driver.executor.links.items()
        )


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
