"""Estimates how many workers best fit, which never moves a running request, would have kept awake.

Owns a scheduler with that policy and the sums of worker-seconds.  It hears the same events as the real scheduler,
except those of moves; its commands reach no worker.

What the shadow cannot know it takes from the real run: requests grow and end when they really do, even if best fit
would have made them wait longer.  A worker of the shadow that overflows, since best fit cannot move requests away,
preempts its youngest requests as vLLM does: they are counted and stay there, without the time to recompute them.
Shared blocks amount to the same as in the real run, spread evenly, as nobody knows which requests share them.  Where
these estimates err, they favour best fit.
"""

import msgspec

from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.cluster import Cluster
from melld.scheduler.events import AnyEvent
from melld.scheduler.policies.fit import BestFit
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.scheduler.state import Worker

REAL_ONLY = (
    events.MoveCommitted,
    events.MoveAborted,
    events.MoveAsked,
    events.RequestPreempted,
    events.RequestResumed,
)


class AwakeSeconds:
    """Worker-seconds awake: active or draining, with or without requests."""

    def __init__(self) -> None:
        self.total = 0.0
        self._since_s = 0.0
        self._awake = 0

    def note(self, cluster: Cluster) -> None:
        """Note the cluster's workers after it has handled an event."""
        now_s = cluster.now_s
        self.total += self._awake * (now_s - self._since_s)
        self._since_s, self._awake = now_s, len(cluster.active) + len(cluster.draining)

    def until(self, now_s: float) -> float:
        """Return the sum up to `now_s`."""
        return self.total + self._awake * max(0.0, now_s - self._since_s)


class Shadow:
    """Best fit without migration, on the events of the real scheduler with these settings."""

    def __init__(self, settings: SchedulerSettings) -> None:
        cluster = msgspec.structs.replace(settings.cluster, instant_moves=True)
        self._scheduler = Scheduler(BestFit, msgspec.structs.replace(settings, cluster=cluster))
        self.awake = AwakeSeconds()
        self.preemptions = 0
        self._preempted: dict[WorkerId, set[RequestId]] = {}
        self._shared_bytes: dict[WorkerId, int] = {}  # in the real run

    def hear(self, event: AnyEvent) -> None:
        """Handle an event of the real scheduler."""
        if isinstance(event, REAL_ONLY):
            return
        if isinstance(event, events.WorkerSharingChanged):
            self._share(event)
        else:
            self._scheduler.handle(event)
            if isinstance(event, events.WorkerDown):
                self._shared_bytes.pop(event.worker, None)
        cluster = self._scheduler.cluster
        if isinstance(event, events.RequestsGrew):
            for worker in cluster.active.values():
                if worker.free_bytes < 0 or worker.id in self._preempted:
                    self._preempt(worker)
        self.awake.note(cluster)

    def _share(self, event: events.WorkerSharingChanged) -> None:
        self._shared_bytes[event.worker] = event.shared_bytes
        cluster = self._scheduler.cluster
        held_bytes = {worker.id: worker.held_bytes for worker in cluster.workers.values() if worker.count > 1}
        all_bytes = sum(held_bytes.values())
        shared_bytes = min(sum(self._shared_bytes.get(worker, 0) for worker in cluster.workers), all_bytes)
        for worker, its_bytes in held_bytes.items():
            part_bytes = shared_bytes * its_bytes // all_bytes
            self._scheduler.handle(events.WorkerSharingChanged(event.at_s, worker, part_bytes))

    def _preempt(self, worker: Worker) -> None:
        """Preempt the youngest requests first, and never the last one; count each only once."""
        over_bytes, out = -worker.free_bytes, set()
        youngest = sorted(worker.requests.values(), key=lambda one: (-one.placed_s, -one.sequence))
        for request in youngest[:-1]:
            if over_bytes <= 0:
                break
            over_bytes -= request.kv_bytes
            out.add(request.id)
        self.preemptions += len(out - self._preempted.pop(worker.id, set()))
        if out:
            self._preempted[worker.id] = out
