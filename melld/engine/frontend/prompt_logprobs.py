"""Processes the logprobs of long prompts in pieces.

vLLM processes all logprobs of a prompt at once after its prefill, on the event loop: 0.03 s for ten thousand of them,
0.36 s if the tokens split characters.  Here such an output is held back until all its pieces are processed; other
requests' outputs go ahead, and later ones of the same request wait behind it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsTensors

from melld.engine.fleet.step_outputs import Step
from melld.engine.frontend.turns import Turns
from melld.ids import RequestId

PIECE = 400
"""Logprobs processed per loop iteration: one to fifteen milliseconds."""


class PromptLogprobs:
    """Holds outputs back until their logprobs are processed."""

    def __init__(
        self, states: Mapping[str, Any], put_back: Callable[[Step], None], turns: Turns, piece: int = PIECE
    ) -> None:
        """`states`: vLLM's, by request id; `put_back` receives outputs that are no longer held back."""
        self._states = states
        self._put_back = put_back
        self._turns = turns
        self._piece = piece
        self._held: dict[str, Step] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def held(self, requests: Iterable[RequestId]) -> list[RequestId]:
        """Return those of these requests whose outputs are held back."""
        return [one for one in requests if one in self._held] if self._held else []

    def sift(self, step: Step) -> Step:
        """Return the step without the outputs that must wait."""
        if (name := next((name for name, held in self._held.items() if held is step), None)) is not None:
            del self._held[name]  # not earlier: outputs already on their way have joined it by now
            return step
        if not self._held and not any(map(self._is_long, step.outputs)):
            return step
        at_once = []
        for output in step.outputs:
            if (held := self._held.get(output.request_id)) is not None:
                held.outputs.append(output)
            elif self._is_long(output):
                self._hold(output, step)
            else:
                at_once.append(output)
        step.outputs = at_once
        return step

    def _is_long(self, output: EngineCoreOutput) -> bool:
        tensors = output.new_prompt_logprobs_tensors
        return tensors is not None and tensors.logprobs.numel() > self._piece

    def _hold(self, output: EngineCoreOutput, step: Step) -> None:
        held = Step(outputs=[output], timestamp=step.timestamp, engine_index=step.engine_index)
        self._held[output.request_id] = held
        task = asyncio.create_task(self._take_in(output), name=f"prompt logprobs of {output.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_in(self, output: EngineCoreOutput) -> None:
        tensors = output.new_prompt_logprobs_tensors
        assert tensors is not None
        positions, alternatives = tensors.logprobs.shape
        step = max(1, self._piece // alternatives)
        for start in range(0, positions, step):
            await self._turns.mine()
            state = self._states.get(output.request_id)
            if state is None:  # the request was aborted
                break
            piece = slice(start, start + step)
            some = LogprobsTensors(
                tensors.logprob_token_ids[piece], tensors.logprobs[piece], tensors.selected_token_ranks[piece]
            )
            try:
                state.logprobs_processor._update_prompt_logprobs(some)  # noqa: SLF001 - vLLM would pass all of them
            except Exception as error:  # noqa: BLE001 - raised where the request's outputs are read, which aborts it
                state.queue.put(error)
                break
        output.new_prompt_logprobs_tensors = None
        self._put_back(self._held[output.request_id])
