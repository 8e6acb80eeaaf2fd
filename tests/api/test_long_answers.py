"""Long answers in pieces: what vLLM gives in one go, byte for byte."""

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.datastructures import State

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports give several
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
    )
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.serve.engine.protocol import UsageInfo
    from vllm.logprobs import Logprob

    from melld.api.long_answers import LongAnswer, make_logprobs_late
    from melld.engine.frontend.turns import Turns

TOKENS = 700
DUMPS: list[dict[str, Any]] = [{}, {"by_alias": True}, {"exclude_none": True}]
LOGPROBS = [
    {token: Logprob(-0.5, 1, "é"), token + 1: Logprob(float("-inf"), 2, '"0"'), token + 2: Logprob(-3.0, 3, "x")}
    for token in range(TOKENS)
]


class Serving:
    """vLLM's ways to make log-probabilities, of both APIs, in answers of some choices."""

    def __init__(self) -> None:
        self.state = State()
        for name, kind in (
            ("openai_serving_chat", OpenAIServingChat),
            ("openai_serving_completion", OpenAIServingCompletion),
        ):
            handler = kind.__new__(kind)
            handler.return_tokens_as_token_ids = False
            setattr(self.state, name, handler)

    async def chat(self, tokens: int = TOKENS) -> ChatCompletionResponse:
        made = self.state.openai_serving_chat._create_chat_logprobs(
            token_ids=range(tokens), top_logprobs=LOGPROBS, tokenizer=None, num_output_top_logprobs=2
        )
        choice = ChatCompletionResponseChoice(
            index=0, message=ChatMessage(role="a", content="b"), logprobs=made, token_ids=list(range(5000))
        )
        return ChatCompletionResponse(
            id="1", created=1, model="m", usage=UsageInfo(), choices=[choice], prompt_logprobs=[None, *LOGPROBS]
        )

    async def completion(self, tokens: int = TOKENS) -> CompletionResponse:
        made = self.state.openai_serving_completion._create_completion_logprobs(
            token_ids=range(tokens), top_logprobs=LOGPROBS, tokenizer=None, num_output_top_logprobs=2
        )
        choices = [
            CompletionResponseChoice(index=index, text="t", logprobs=made, prompt_logprobs=[None, *LOGPROBS])
            for index in range(3)
        ]
        choices += [CompletionResponseChoice(index=index, text="short") for index in range(600)]
        return CompletionResponse(id="1", created=1, model="m", usage=UsageInfo(), choices=choices)


@pytest.fixture
def serving() -> Serving:
    return Serving()


@pytest.mark.parametrize("dump", DUMPS, ids=str)
@pytest.mark.parametrize("method", ["chat", "completion"])
def test_the_pieces_make_the_json_that_pydantic_makes(serving: Serving, method: str, dump: dict[str, Any]) -> None:
    """No client sees a difference, late log-probabilities included."""
    want = asyncio.run(getattr(serving, method)()).model_dump_json(**dump).encode()
    make_logprobs_late(serving.state)

    async def main() -> bytes:
        long = LongAnswer(Turns())
        return await long.encode(await long.ask(getattr(serving, method)()), dump)

    assert asyncio.run(main()) == want


@pytest.mark.parametrize("method", ["chat", "completion"])
def test_a_stream_gets_its_log_probabilities_at_once(serving: Serving, method: str) -> None:
    """What is written as it comes has nobody who would make the rest."""
    want = asyncio.run(getattr(serving, method)())
    make_logprobs_late(serving.state)
    assert asyncio.run(getattr(serving, method)()) == want


def test_the_loop_turns_between_the_pieces(serving: Serving) -> None:
    """That is what they are for: a task beside them runs as often as there are pieces."""
    make_logprobs_late(serving.state)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def main() -> None:
        counting = asyncio.create_task(count())
        long = LongAnswer(Turns())
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
    assert asyncio.run(LongAnswer(Turns()).encode(answer, {})) == answer.model_dump_json().encode()


def test_a_model_without_an_api_has_nothing_to_change() -> None:
    """Embedding models have neither chat nor completions."""
    state = State()
    state.openai_serving_chat = SimpleNamespace()
    make_logprobs_late(state)
    assert not vars(state.openai_serving_chat)
