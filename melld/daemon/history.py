"""When and why workers were woken or put to sleep, and what packing has saved.

Owns the last reason of each worker, and the shadow of best fit.  Hears every event and decision.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from melld.daemon.shadow import AwakeSeconds, Shadow
from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.scheduler import Scheduler

SECONDS_PER_HOUR = 3600.0


class Because(NamedTuple):
    """A decision of the scheduler: when, and its word for why."""

    at_s: float
    cause: str


class History:
    """The daemon's memory of reasons."""

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
        """Note an event and what was decided on it."""
        if isinstance(event, events.WorkerDown):
            self.switched.pop(event.worker, None)
        for command in commands:
            if isinstance(command, events.ActivateWorker | events.RetireWorker):
                self.switched[command.worker] = Because(event.at_s, command.reason)
        self._awake.note(self._cluster)
        self._shadow.hear(event)

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
