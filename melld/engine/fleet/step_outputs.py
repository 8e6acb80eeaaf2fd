"""The outputs of steps on their way from the workers to vLLM's front end.

Owns the queue.  While a worker's outputs wait there, its next ones join them: each request then has one output with
several tokens, as after speculative decoding, and costs its front end little more than one token would.  While nothing
waits, the front end may take a step at once, without a turn of the loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from melld.ids import WorkerId

MOST_STEPS = 8
"""Steps of one worker that may wait: beyond that, what each token costs by itself is most of the cost."""


class StepOutputs(asyncio.Queue[Any]):
    """A queue of vLLM's `EngineCoreOutputs`.

    `join`: see `Codec.join_outputs`.  Calls `pause` for a worker that should wait, and later `resume`; `is_behind`
    returns True while further messages of workers are there already.
    """

    def __init__(
        self,
        join: Callable[[Any, Any], bool],
        pause: Callable[[WorkerId], None],
        resume: Callable[[WorkerId], None],
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._is_behind = is_behind
        self._take: Callable[[Any], bool] | None = None
        self._join = join
        self._pause = pause
        self._resume = resume
        self._open: dict[WorkerId, Any] = {}
        """The last ones of each worker, while they wait and others may join them."""
        self._steps: dict[WorkerId, int] = {}

    def put_step(self, worker: WorkerId, outputs: Any) -> None:
        """Queue a step's outputs, merged with the worker's queued ones if there are any, unless they are taken."""
        if self._take is not None and self.empty() and not self._is_behind():
            try:
                if self._take(outputs):
                    return
            except Exception as error:  # noqa: BLE001  raised where the outputs are read
                self.put_nowait(error)
                return
        waiting = self._open.get(worker)
        if waiting is not None and self._join(waiting, outputs):
            self._steps[worker] += 1
            if self._steps[worker] >= MOST_STEPS:
                self._pause(worker)
            if outputs.scheduler_stats is None:
                return
        else:
            if waiting is not None:
                self._close(worker)
            self._open[worker], self._steps[worker] = outputs, 1
        self.put_nowait(outputs)

    async def get_or_take(self, take: Callable[[Any], bool]) -> Any:
        """Return the next outputs; until they come, let `take` have each step first, which returns True if it did."""
        self._take = take
        try:
            outputs = await self.get()
        finally:
            self._take = None
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    def seal(self) -> None:
        """Merge nothing more into the queued outputs: a request's outputs from its next worker must follow."""
        for worker in list(self._open):
            self._close(worker)

    def _close(self, worker: WorkerId) -> None:
        del self._open[worker]
        self._resume(worker)

    def _get(self) -> Any:
        outputs = super()._get()
        for worker, waiting in self._open.items():
            if waiting is outputs:
                self._close(worker)
                break
        return outputs
