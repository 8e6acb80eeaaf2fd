"""Long answers in pieces: what vLLM gives in one go, byte for byte."""

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.datastructures import State
from vllm import logprobs
from vllm.entrypoints.openai.chat_completion import protocol as chats
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.completion import protocol as completions
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.serve.engine import protocol as usage

from melld.api import long_answers
from melld.engine.frontend.turns import Turns

TOKENS = 700
DUMPS: list[dict[str, Any]] = [{}, {"by_alias": True}, {"exclude_none": True}]


@functools.cache
def all_logprobs() -> list[dict[int, Any]]:
    one = logprobs.Logprob
    return [
        {token: one(-0.5, 1, "é"), token + 1: one(float("-inf"), 2, '"0"'), token + 2: one(-3.0, 3, "x")}
        for token in range(TOKENS)
    ]


class Serving:
    """vLLM's ways to make log-probabilities, of both APIs, in answers of some choices."""

    def __init__(self) -> None:
        self.state = State()
        for name, kind in (
            ("openai_serving_chat", chat_serving.OpenAIServingChat),
            ("openai_serving_completion", completion_serving.OpenAIServingCompletion),
        ):
            handler = kind.__new__(kind)
            handler.return_tokens_as_token_ids = False
            setattr(self.state, name, handler)

    async def chat(self, tokens: int = TOKENS) -> Any:
        made = self.state.openai_serving_chat._create_chat_logprobs(
            token_ids=range(tokens), top_logprobs=all_logprobs(), tokenizer=None, num_output_top_logprobs=2
        )
        choice = chats.ChatCompletionResponseChoice(
            index=0, message=chats.ChatMessage(role="a", content="b"), logprobs=made, token_ids=list(range(5000))
        )
        return chats.ChatCompletionResponse(
            id="1",
            created=1,
            model="m",
            usage=usage.UsageInfo(),
            choices=[choice],
            prompt_logprobs=[None, *all_logprobs()],
        )

    async def completion(self, tokens: int = TOKENS) -> Any:
        made = self.state.openai_serving_completion._create_completion_logprobs(
            token_ids=range(tokens), top_logprobs=all_logprobs(), tokenizer=None, num_output_top_logprobs=2
        )
        choices = [
            completions.CompletionResponseChoice(
                index=index, text="t", logprobs=made, prompt_logprobs=[None, *all_logprobs()]
            )
            for index in range(3)
        ]
        choices += [completions.CompletionResponseChoice(index=index, text="short") for index in range(600)]
        one = usage.UsageInfo()
        return completions.CompletionResponse(id="1", created=1, model="m", usage=one, choices=choices)


@pytest.fixture
def serving() -> Serving:
    return Serving()


@pytest.mark.parametrize("dump", DUMPS, ids=str)
@pytest.mark.parametrize("method", ["chat", "completion"])
def test_the_pieces_make_the_json_that_pydantic_makes(serving: Serving, method: str, dump: dict[str, Any]) -> None:
    """No client sees a difference, late log-probabilities included."""
    want = asyncio.run(getattr(serving, method)()).model_dump_json(**dump).encode()
    long_answers.make_logprobs_late(serving.state)

    async def main() -> bytes:
        long = long_answers.LongAnswer(Turns())
        return await long.encode(await long.ask(getattr(serving, method)()), dump)

    assert asyncio.run(main()) == want


@pytest.mark.parametrize("method", ["chat", "completion"])
def test_a_stream_gets_its_log_probabilities_at_once(serving: Serving, method: str) -> None:
    """What is written as it comes has nobody who would make the rest."""
    want = asyncio.run(getattr(serving, method)())
    long_answers.make_logprobs_late(serving.state)
    assert asyncio.run(getattr(serving, method)()) == want


def test_the_loop_turns_between_the_pieces(serving: Serving) -> None:
    """That is what they are for: a task beside them runs as often as there are pieces."""
    long_answers.make_logprobs_late(serving.state)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def main() -> None:
        counting = asyncio.create_task(count())
        long = long_answers.LongAnswer(Turns())
        await long.encode(await long.ask(serving.chat()), {})
        counting.cancel()

    asyncio.run(main())
    values = TOKENS * 3 * 2 + TOKENS * 4 + 5000
    assert turns > values / 1000


def test_a_clients_text_is_not_taken_for_a_mark() -> None:
    """The marks are drawn anew for each answer."""

    class Simple(BaseModel):
        text: str
        values: list[int]

    answer = Simple(text='0"0"' + "0" * 32, values=list(range(3000)))
    assert asyncio.run(long_answers.LongAnswer(Turns()).encode(answer, {})) == answer.model_dump_json().encode()


def test_a_model_without_an_api_has_nothing_to_change() -> None:
    """Embedding models have neither chat nor completions."""
    state = State()
    state.openai_serving_chat = SimpleNamespace()
    long_answers.make_logprobs_late(state)
    assert not vars(state.openai_serving_chat)
