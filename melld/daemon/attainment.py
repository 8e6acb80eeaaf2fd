"""Counts the requests that were served as promised: first token in time, and pace kept.

Owns the counts, and models of the workers' speed to judge them by.  Pure: hears of the scheduler's events and commands.
"""

from collections.abc import Mapping, Sequence

from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.policies.slo.models import PromptModel, StepModel
from melld.scheduler.state import Worker
from melld.scheduler.targets import MEAN_OVER_TOKENS, Targets


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
        """Return the pace that requests are promised, in seconds per token; None: any."""
        return self._targets.pace_s(self._steps.lone_step_s())

    @property
    def ttft_target_s(self) -> float:
        """Return the least time that a first token may take, in seconds."""
        return self._targets.ttft_s

    def heard(self, event: events.AnyEvent, commands: Sequence[events.AnyCommand]) -> None:
        """Take an event of the scheduler's and its commands."""
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
            if isinstance(command, events.ShedRequest) and self._arrived.pop(command.request, None) is not None:
                self.judged += 1

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
