"""The fleet as one engine of vLLM's.

Owns the seam: `FleetClient` is an `EngineCoreClient` (vllm.v1.engine.core_client), so that `AsyncLLM` and everything
above it see one engine.  `AsyncLLM` makes its client by itself: here that is `Nobody`, until it is connected.
"""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient

from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.step_outputs import Step
from melld.engine.frontend.caller import caller
from melld.engine.frontend.masks import Masks
from melld.engine.frontend.plain_outputs import MOST_AT_ONCE, Counts, Others, Tokens
from melld.engine.frontend.prompt_logprobs import PromptLogprobs
from melld.engine.frontend.turns import Turns
from melld.ids import RequestId

LONGEST_TURN_S = 0.002
"""Longest time that outputs may keep the event loop from everything else."""


class FleetClient(EngineCoreClient):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """The fleet, presented to `AsyncLLM` as one engine."""

    def __init__(
        self,
        fleet: Fleet,
        supported_tasks: tuple[str, ...],
        vocabulary: int,
        prompt_logprobs: PromptLogprobs,
        masks: Masks,
        turns: Turns,
    ) -> None:
        self._fleet = fleet
        self._turns = turns
        self._supported_tasks = supported_tasks
        self._vocabulary = vocabulary
        self.resources = SimpleNamespace(engine_dead=False)  # a fleet is never dead: its workers restart
        self._prompt_logprobs = prompt_logprobs
        self._masks = masks
        self.engine_ranks_managed = list(range(len(fleet.places)))
        self._turned_s = 0.0
        self.take_step: Callable[[Step], bool] = lambda _: False
        """Does all the work of a step that only continues plain answers, and returns True if it is one."""
        self.take_plain: Callable[[Tokens, float, Counts], Others] = lambda tokens, *_: list(tokens)
        """Takes tokens that continue plain answers, counts them, and returns the others."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the daemon stops the workers."""

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the model's tasks, as the workers reported them."""
        return self._supported_tasks

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Submit a request.

        Raises:
            RequestTooLarge: the request fits no worker.
            QueueFull: too many requests wait.
            NoTokenLeft: its parameters rule out every token.
            TooManyPromptLogprobs, TooManyPromptLogprobsNow: see `Caller`.
        """
        called = caller()
        if called.admitted.is_set():  # its first request has the turn in which it was prepared
            await self._turns.mine()  # not admitted yet: a call cancelled here holds nothing
        self._masks.add(request.request_id, request.sampling_params)
        called.take_prompt_logprobs(self._count_prompt_logprobs(request))
        request.priority = called.priority
        request.arrival_time = time.monotonic()  # workers order requests by it: vLLM's wall clock may be adjusted
        self._fleet.requests.admit(request, called.client)
        called.admitted.set()

    def _count_prompt_logprobs(self, request: EngineCoreRequest) -> int:
        """Count the logprobs of the prompt: each token has its own, and those of the most likely tokens."""
        params = request.sampling_params
        if params is None or params.prompt_logprobs is None:
            return 0
        most_likely = self._vocabulary if params.prompt_logprobs < 0 else params.prompt_logprobs
        return len(request.prompt_token_ids or ()) * (most_likely + 1)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort the requests at once."""
        self._fleet.requests.abort(request_ids)

    async def get_output_async(self) -> Step:
        """Return the outputs of the next step of any worker, after taking its plain tokens.

        If many are waiting, their reader would never yield to the event loop on its own.
        """
        queue = self._fleet.outputs
        is_new_turn = queue.empty()  # then `get` waits
        if not is_new_turn and time.monotonic() - self._turned_s > LONGEST_TURN_S:
            await asyncio.sleep(0)
            is_new_turn = True
        step = await queue.get_or_take(self._take)
        if is_new_turn:
            self._turned_s = time.monotonic()
        step.engine_index %= len(self.engine_ranks_managed)  # vLLM's metrics do not handle engines added later
        step.outputs[:0] = [EngineCoreOutput(request, step.tokens.pop(request)) for request in self._watched(step)]
        step = self._masks.sift(self._prompt_logprobs.sift(step))
        if step.tokens:
            await self._take_plain(step)
        return step

    def _watched(self, step: Step) -> set[RequestId]:
        """Return the requests whose tokens must be looked at in outputs."""
        return {*self._masks.watched(step.tokens), *self._prompt_logprobs.held(step.tokens)}

    async def _take_plain(self, step: Step) -> None:
        """Take the plain tokens; put what they count, and outputs with the other tokens, before the step's own."""
        counts, others, tokens = Counts(), [], list(step.tokens.items())
        for start in range(0, len(tokens), MOST_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            others += self.take_plain(tokens[start : start + MOST_AT_ONCE], step.timestamp, counts)
        step.tokens = {}
        step.outputs[:0] = [counts, *(EngineCoreOutput(*one) for one in others)]

    def _take(self, step: Step) -> bool:
        if step.outputs or step.scheduler_stats is not None or self._watched(step):
            return False
        step.engine_index %= len(self.engine_ranks_managed)
        return self.take_step(step)


class Nobody(EngineCoreClient):  # type: ignore[misc]
    """The engine of a front end that has no fleet yet."""

    engine_ranks_managed = (0,)

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing."""

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:  # noqa: ARG002
        """Do nothing: workers load it later."""
        return True


EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: Nobody())
