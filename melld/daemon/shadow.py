"""What another way of placing the same requests would have kept awake: best fit, which never moves a running request.

Owns a scheduler of its own under that policy, and the sums of worker-seconds.  It is given the events that the real one
is given, less the moves, and its commands are carried out in thought: nothing here reaches a worker.

What the shadow cannot know it takes from the real run: requests grow and end there when they do in truth, also where
best fit would have let them wait longer.  A worker of the shadow that overflows, since best fit cannot move what has
grown too large, pushes its youngest requests out as vLLM does: counted as preemptions, and they stay with it, without
the time that computing them anew would take.  Of what requests hold in common there is as much in the shadow as in
truth, spread evenly, for nobody knows who shares with whom.  So it errs, if at all, on the side of best fit.
"""

import msgspec

from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.cluster import Cluster
from melld.scheduler.events import AnyEvent
from melld.scheduler.policies.fit import BestFit
from melld.scheduler.scheduler import Scheduler, SchedulerSettings
from melld.scheduler.state import Worker

REAL_ALONE = (
    events.MoveCommitted,
    events.MoveAborted,
    events.MoveAsked,
    events.RequestPreempted,
    events.RequestResumed,
)


class AwakeSeconds:
    """The sum over workers of the seconds in which they were awake: active or draining, with requests or without."""

    def __init__(self) -> None:
        self.total = 0.0
        self._since_s = 0.0
        self._awake = 0

    def note(self, cluster: Cluster) -> None:
        """The cluster has just handled an event."""
        now_s = cluster.now_s
        self.total += self._awake * (now_s - self._since_s)
        self._since_s, self._awake = now_s, len(cluster.active) + len(cluster.draining)

    def until(self, now_s: float) -> float:
        """The sum as of now."""
        return self.total + self._awake * max(0.0, now_s - self._since_s)


class Shadow:
    """Best fit without migration, on the events of a real scheduler with these settings."""

    def __init__(self, settings: SchedulerSettings) -> None:
        cluster = msgspec.structs.replace(settings.cluster, instant_moves=True)
        self._scheduler = Scheduler(BestFit, msgspec.structs.replace(settings, cluster=cluster))
        self.awake = AwakeSeconds()
        self.preemptions = 0
        self._pushed_out: dict[WorkerId, set[RequestId]] = {}
        self._shared_bytes: dict[WorkerId, int] = {}  # in truth

    def hear(self, event: AnyEvent) -> None:
        """Take what the real scheduler has taken."""
        if isinstance(event, REAL_ALONE):
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
                if worker.free_bytes < 0 or worker.id in self._pushed_out:
                    self._push_out(worker)
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

    def _push_out(self, worker: Worker) -> None:
        """The youngest first, and never the last one; those that are out already are not counted again."""
        over_bytes, out = -worker.free_bytes, set()
        youngest = sorted(worker.requests.values(), key=lambda one: (-one.placed_s, -one.sequence))
        for request in youngest[:-1]:
            if over_bytes <= 0:
                break
            over_bytes -= request.kv_bytes
            out.add(request.id)
        self.preemptions += len(out - self._pushed_out.pop(worker.id, set()))
        if out:
            self._pushed_out[worker.id] = out
