"""The outputs of steps on their way from the workers to vLLM's front end.

Owns the queue.  While a worker's step waits there, its next ones join it: each request then has several tokens at once,
as after speculative decoding, and costs its front end little more than one token would.  While nothing waits, the front
end may take a step at once, without a turn of the loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from melld.ids import RequestId, WorkerId

MOST_STEPS = 8
"""Steps of one worker that may wait: beyond that, what each token costs by itself is most of the cost."""


class Step(msgspec.Struct):
    """Outputs of one step or several of a worker: vLLM's `EngineCoreOutputs`, apart from `tokens`."""

    tokens: dict[RequestId, list[int]] = {}
    """request -> its next tokens, if that is all; they precede its output."""
    outputs: list[Any] = []
    """An `EngineCoreOutput` for each of the other requests."""
    scheduler_stats: Any = None
    timestamp: float = 0.0
    engine_index: int = 0
    """The worker's: the `engine` label of vLLM's metrics."""
    weight_version: None = None
    """It never changes here, and vLLM would check it for each token."""

    def join(self, later: "Step") -> None:
        """Take over the tokens and outputs of the worker's next step, but not its statistics: they contain counters."""
        last = {output.request_id: output for output in self.outputs}
        for request, token_ids in later.tokens.items():
            if (output := last.get(request)) is not None:
                output.new_token_ids += token_ids
            elif (known := self.tokens.get(request)) is not None:
                known += token_ids
            else:
                self.tokens[request] = token_ids
        self.outputs += later.outputs
        self.timestamp = later.timestamp
        later.tokens, later.outputs = {}, []


class StepOutputs(asyncio.Queue[Any]):
    """A queue of steps.

    Calls `pause` for a worker that should wait, and later `resume`; `is_behind` returns True while further messages of
    workers are there already.
    """

    def __init__(
        self,
        pause: Callable[[WorkerId], None],
        resume: Callable[[WorkerId], None],
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._is_behind = is_behind
        self._take: Callable[[Step], bool] | None = None
        self._pause = pause
        self._resume = resume
        self._open: dict[WorkerId, Step] = {}
        """The last one of each worker, while it waits and others may join it."""
        self._steps: dict[WorkerId, int] = {}

    def put_step(self, worker: WorkerId, step: Step) -> None:
        """Queue a step, merged with the worker's queued one if there is any, unless it is taken."""
        if self._take is not None and self.empty() and not self._is_behind():
            try:
                if self._take(step):
                    return
            except Exception as error:  # noqa: BLE001  raised where the outputs are read
                self.put_nowait(error)
                return
        if (waiting := self._open.get(worker)) is not None:
            waiting.join(step)
            self._steps[worker] += 1
            if self._steps[worker] >= MOST_STEPS:
                self._pause(worker)
            if step.scheduler_stats is None:
                return
        else:
            self._open[worker], self._steps[worker] = step, 1
        self.put_nowait(step)

    async def get_or_take(self, take: Callable[[Step], bool]) -> Step:
        """Return the next step that `take` does not take; it gets each first that comes meanwhile."""
        self._take = take
        try:
            step = await self.get()
        finally:
            self._take = None
        if isinstance(step, Exception):
            raise step
        assert isinstance(step, Step)
        return step

    def seal(self) -> None:
        """Merge nothing more into the queued steps: a request's outputs from its next worker must follow."""
        for worker in list(self._open):
            self._close(worker)

    def _close(self, worker: WorkerId) -> None:
        del self._open[worker]
        self._resume(worker)

    def _get(self) -> Any:
        step = super()._get()
        for worker, waiting in self._open.items():
            if waiting is step:
                self._close(worker)
                break
        return step
