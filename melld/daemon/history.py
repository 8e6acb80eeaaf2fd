"""Remembers why workers woke or slept, for how long, and what each client was served, and how well.

Owns the last reason of each worker, the sums of worker-seconds, the counts of requests whose first token came in time
and whose pace was kept, models of the workers' speed to judge them by, and what each client has used.  Hears of every
event and its commands.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.policies.slo.models import PromptModel, StepModel
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.state import Worker
from melld.scheduler.targets import MEAN_OVER_TOKENS, Targets

OTHERS = "other"
"""The one name of clients that the configuration does not name, so that metrics have few series."""


class Attainment:
    """Counts since the start.

    A request that was sent away for want of room has missed both targets; one that could never run, or whose client
    left before its first token, is not judged.
    """

    def __init__(self, targets: Targets, workers: Mapping[WorkerId, Worker]) -> None:
        self.judged = self.in_time = self.in_pace = self.attained = 0
        self._targets = targets
        self._workers = workers
        self._steps, self._prompts = StepModel(), PromptModel()
        self._arrived: dict[RequestId, tuple[float, int]] = {}

    @property
    def itl_target_s(self) -> float | None:
        """Return the promised pace in seconds per token; None: no promise."""
        return self._targets.pace_s(self._steps.lone_step_s())

    @property
    def ttft_target_s(self) -> float:
        """Return the minimum of the first-token target, in seconds."""
        return self._targets.ttft_s

    def heard(self, event: events.AnyEvent, commands: Sequence[events.AnyCommand]) -> None:
        """Note an event and its commands."""
        match event:
            case events.WorkersPaced():
                for name, pace in event.paces.items():
                    if (worker := self._workers.get(name)) is not None:
                        self._steps.observe(worker, pace)
                        self._prompts.observe(pace)
            case events.RequestArrived():
                self._arrived[event.request] = event.at_s, event.prompt_tokens
            case events.RequestFinished():
                self._ended(event)
        for command in commands:
            if isinstance(command, events.ShedRequest | events.RefuseRequest):
                was_known = self._arrived.pop(command.request, None) is not None
                self.judged += was_known and isinstance(command, events.ShedRequest)

    def _ended(self, event: events.RequestFinished) -> None:
        arrived_s, prompt_tokens = self._arrived.pop(event.request, (0.0, 0))
        if not arrived_s or not event.first_token_s:
            return
        itl_s = self.itl_target_s
        tokens = max(event.output_tokens - 1, MEAN_OVER_TOKENS)
        in_time = event.first_token_s - arrived_s <= self._targets.first_token_s(self._prompts.seconds(prompt_tokens))
        in_pace = itl_s is None or (event.at_s - event.first_token_s) / tokens <= itl_s
        self.judged += 1
        self.in_time += in_time
        self.in_pace += in_pace
        self.attained += in_time and in_pace


@dataclasses.dataclass
class Use:
    """The sums of one client.  A prompt counts for each of its choices."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class ClientUse:
    """The sums by client name; `names` returns the currently configured ones."""

    def __init__(self, names: Callable[[], Collection[str]]) -> None:
        self.by_client: defaultdict[str, Use] = defaultdict(Use)
        self._names = names
        self._waiting: dict[RequestId, events.RequestArrived] = {}
        self._begun: dict[RequestId, events.RequestArrived] = {}

    def heard(self, event: events.AnyEvent, commands: Sequence[events.AnyCommand]) -> None:
        """Note an event and its commands; a request that no worker got is not billed."""
        if isinstance(event, events.RequestArrived):
            self._waiting[event.request] = event
        for command in commands:
            if isinstance(command, events.PlaceRequest) and command.request in self._waiting:
                self._begun[command.request] = self._waiting.pop(command.request)
            elif isinstance(command, events.ShedRequest | events.RefuseRequest):
                self._waiting.pop(command.request, None)
        if isinstance(event, events.RequestFinished):
            self._waiting.pop(event.request, None)
            if (arrived := self._begun.pop(event.request, None)) is not None:
                self._count(arrived, event.output_tokens)

    def _count(self, arrived: events.RequestArrived, output_tokens: int) -> None:
        use = self.by_client[arrived.client if arrived.client in self._names() else OTHERS]
        use.requests += 1
        use.prompt_tokens += arrived.prompt_tokens
        use.output_tokens += output_tokens


class Because(NamedTuple):
    """Time and reason of a decision of the scheduler."""

    at_s: float
    cause: str


class WorkerSeconds(NamedTuple):
    """Seconds that workers were awake, and that they existed at all, summed over the workers."""

    awake: float
    known: float


class History:
    """The reasons for the workers' states, and the sums of worker-seconds."""

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float], client_names: Callable[[], Collection[str]] = tuple
    ) -> None:
        self.switched: dict[WorkerId, Because] = {}
        """When each worker was last woken or put to sleep."""
        self._cluster = scheduler.cluster
        self._clock = clock
        self.attainment = Attainment(scheduler.settings.cluster.targets or Targets(), self._cluster.workers)
        self.use = ClientUse(client_names)
        self._sums = WorkerSeconds(0.0, 0.0)
        self._since_s = 0.0
        self._awake = self._known = 0

    def heard(
        self, event: events.AnyEvent, commands: Sequence[events.AnyCommand], _routes: Mapping[RequestId, str]
    ) -> None:
        """Note an event and its commands."""
        if isinstance(event, events.WorkerDown | events.WorkerResumed):
            for worker in event.workers if isinstance(event, events.WorkerDown) else (event.worker,):
                self.switched.pop(worker, None)
        for command in commands:
            if isinstance(command, events.ActivateWorker | events.RetireWorker):
                self.switched[command.worker] = Because(event.at_s, command.reason)
        self.attainment.heard(event, commands)
        self.use.heard(event, commands)
        self._sums, self._since_s = self._until(event.at_s), event.at_s
        self._awake = len(self._cluster.active) + len(self._cluster.draining)
        self._known = len(self._cluster.workers)

    def worker_seconds(self) -> WorkerSeconds:
        """Return the sums since the start."""
        return self._until(self._clock())

    def _until(self, now_s: float) -> WorkerSeconds:
        passed_s = max(0.0, now_s - self._since_s)
        return WorkerSeconds(self._sums.awake + self._awake * passed_s, self._sums.known + self._known * passed_s)
