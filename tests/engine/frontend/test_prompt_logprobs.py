"""Log-probabilities of prompts, processed piece by piece: equal to vLLM's own, with outputs in the same order."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import logprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1 import engine, outputs
from vllm.v1.engine import logprobs as processors
from vllm.v1.engine.output_processor import RequestOutputCollector

from melld.engine.fleet.step_outputs import Step
from melld.engine.frontend import prompt_logprobs
from melld.engine.frontend.turns import Turns
from tests.patience import PATIENCE_S

ALTERNATIVES = 3
POSITIONS = 50


def processor() -> Any:
    return processors.LogprobsProcessor(
        tokenizer=None,
        logprobs=None,
        prompt_logprobs=logprobs.create_prompt_logprobs(flat_logprobs=False),
        cumulative_logprob=None,
        num_logprobs=None,
        num_prompt_logprobs=ALTERNATIVES - 1,
    )


def tensors(positions: int = POSITIONS) -> Any:
    values = torch.arange(positions * ALTERNATIVES).reshape(positions, ALTERNATIVES)
    return outputs.LogprobsTensors(values, -values.float(), torch.arange(positions))


def output(request: str, token: int, logprobs: Any = None) -> Any:
    return engine.EngineCoreOutput(request_id=request, new_token_ids=[token], new_prompt_logprobs_tensors=logprobs)


class Held:
    """A `PromptLogprobs` with small pieces, and what it returns."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {"long": SimpleNamespace(logprobs_processor=processor())}
        self.back: asyncio.Queue[Any] = asyncio.Queue()
        self.logprobs = prompt_logprobs.PromptLogprobs(self.states, self.back.put_nowait, Turns(), 10)

    def sift(self, *given: Any) -> list[tuple[str, list[int]]]:
        return told(self.logprobs.sift(Step(engine_index=3, outputs=list(given), timestamp=7.0)))


def told(step: Any) -> list[tuple[str, list[int]]]:
    return [(one.request_id, one.new_token_ids) for one in step.outputs]


def test_the_pieces_equal_the_whole() -> None:
    """Nobody sees that it was cut."""
    whole = processor()
    whole._update_prompt_logprobs(tensors())

    async def main() -> Any:
        held = Held()
        assert held.sift(output("long", 1, tensors())) == []
        back = await held.back.get()
        assert held.states["long"].logprobs_processor.prompt_logprobs == whole.prompt_logprobs
        return back

    back = asyncio.run(main())
    assert (back.engine_index, back.timestamp) == (3, 7.0)
    assert back.outputs[0].new_prompt_logprobs_tensors is None


def test_others_go_ahead_and_its_own_tokens_keep_their_order() -> None:
    """One client's log-probabilities do not pause the rest, and no token passes another of its stream."""

    async def main() -> None:
        held = Held()
        assert held.sift(output("a", 1), output("long", 2, tensors()), output("b", 3)) == [("a", [1]), ("b", [3])]
        assert held.sift(output("long", 4), output("a", 5)) == [("a", [5])]
        back = await held.back.get()
        assert held.sift(output("long", 6), output("b", 7)) == [("b", [7])]  # it was in the line before
        assert told(held.logprobs.sift(back)) == [("long", [2]), ("long", [4]), ("long", [6])]
        assert held.sift(output("long", 8)) == [("long", [8])]

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_the_rest_is_dropped_when_the_request_is_aborted(turns: int) -> None:
    """Nobody waits for it, and nothing of it is kept."""

    async def main() -> None:
        held = Held()
        held.sift(output("long", 1, tensors()))
        for _ in range(turns):
            await asyncio.sleep(0)
        del held.states["long"]
        assert told(held.logprobs.sift(await held.back.get())) == [("long", [1])]
        assert held.sift(output("long", 2)) == [("long", [2])]

    asyncio.run(main())


def test_an_error_ends_only_its_own_request() -> None:
    """A request whose log-probabilities cannot be read, say for a tokenizer bug, does not wait forever."""

    class Broken:
        def batch_decode(self, *_: Any, **__: Any) -> list[str]:
            raise RuntimeError("no such token")

        decode = convert_ids_to_tokens = batch_decode

    async def main() -> None:
        held = Held()
        queue = RequestOutputCollector(RequestOutputKind.DELTA, "long")
        held.states["long"].queue = queue
        held.states["long"].logprobs_processor.tokenizer = Broken()
        assert held.sift(output("long", 1, tensors()), output("a", 2)) == [("a", [2])]
        with pytest.raises(RuntimeError, match="no such token"):
            await asyncio.wait_for(queue.get(), PATIENCE_S)
        back = await asyncio.wait_for(held.back.get(), PATIENCE_S)
        assert told(held.logprobs.sift(back)) == [("long", [1])]
        assert held.sift(output("long", 3)) == [("long", [3])]

    asyncio.run(main())


def test_a_short_prompt_is_not_held_back() -> None:
    """Few log-probabilities are left to vLLM."""

    async def main() -> None:
        short = output("long", 1, tensors(2))
        assert Held().sift(short) == [("long", [1])]
        assert short.new_prompt_logprobs_tensors is not None

    asyncio.run(main())
