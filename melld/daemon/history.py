"""Remembers when and why workers were woken or put to sleep, and what packing has saved.

Owns the last reason of each worker and the shadow of best fit.  Hears of every event and its commands.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from melld.daemon.shadow import AwakeSeconds, Shadow
from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.scheduler import Scheduler

SECONDS_PER_HOUR = 3600.0


class Because(NamedTuple):
    """Time and reason of a decision of the scheduler."""

    at_s: float
    cause: str


class History:
    """The reasons for the workers' states, and the sums of worker-seconds."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.switched: dict[WorkerId, Because] = {}
        """When each worker was last woken or put to sleep."""
        self._cluster = scheduler.cluster
        self._clock = clock
        self._awake = AwakeSeconds()
        self._shadow = Shadow(scheduler.settings)

    def heard(
        self, event: events.AnyEvent, commands: Sequence[events.AnyCommand], _routes: Mapping[RequestId, str]
    ) -> None:
        """Note an event and its commands."""
        if isinstance(event, events.WorkerDown):
            self.switched.pop(event.worker, None)
        for command in commands:
            if isinstance(command, events.ActivateWorker | events.RetireWorker):
                self.switched[command.worker] = Because(event.at_s, command.reason)
        self._awake.note(self._cluster)
        self._shadow.hear(event)

    @property
    def worker_seconds_awake(self) -> float:
        """Worker-seconds awake since the start."""
        return self._awake.until(self._clock())

    @property
    def shadow_worker_seconds_awake(self) -> float:
        """Worker-seconds that best fit without migration would have needed."""
        return self._shadow.awake.until(self._clock())

    @property
    def gpu_hours_saved(self) -> float:
        """The difference of the two, in hours."""
        return (self.shadow_worker_seconds_awake - self.worker_seconds_awake) / SECONDS_PER_HOUR

    @property
    def shadow_preemptions(self) -> int:
        """Requests that best fit would have had to preempt."""
        return self._shadow.preemptions
