"""Remembers when and why workers were woken or put to sleep, for how long they were awake, and who was served in time.

Owns the last reason of each worker and the sums of worker-seconds.  Hears of every event and its commands.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from melld.daemon.attainment import Attainment
from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.targets import Targets


class Because(NamedTuple):
    """Time and reason of a decision of the scheduler."""

    at_s: float
    cause: str


class WorkerSeconds(NamedTuple):
    """Seconds that workers were awake, and that they were there at all, asleep or not, summed over the workers."""

    awake: float
    known: float


class History:
    """The reasons for the workers' states, and the sums of worker-seconds."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.switched: dict[WorkerId, Because] = {}
        """When each worker was last woken or put to sleep."""
        self._cluster = scheduler.cluster
        self._clock = clock
        self.attainment = Attainment(scheduler.settings.cluster.targets or Targets(), self._cluster.workers)
        self._sums = WorkerSeconds(0.0, 0.0)
        self._since_s = 0.0
        self._awake = self._known = 0

    def heard(
        self, event: events.AnyEvent, commands: Sequence[events.AnyCommand], _routes: Mapping[RequestId, str]
    ) -> None:
        """Note an event and its commands."""
        if isinstance(event, events.WorkerDown):
            for worker in event.workers:
                self.switched.pop(worker, None)
        for command in commands:
            if isinstance(command, events.ActivateWorker | events.RetireWorker):
                self.switched[command.worker] = Because(event.at_s, command.reason)
        self.attainment.heard(event, commands)
        self._sums, self._since_s = self._until(event.at_s), event.at_s
        self._awake = len(self._cluster.active) + len(self._cluster.draining)
        self._known = len(self._cluster.workers)

    def worker_seconds(self) -> WorkerSeconds:
        """Return the sums since the start."""
        return self._until(self._clock())

    def _until(self, now_s: float) -> WorkerSeconds:
        passed_s = max(0.0, now_s - self._since_s)
        return WorkerSeconds(self._sums.awake + self._awake * passed_s, self._sums.known + self._known * passed_s)
