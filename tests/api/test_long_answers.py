"""Long answers written in pieces: byte for byte what vLLM gives in one go."""

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
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


def handler_of(kind: type) -> Any:
    """Return a bare serving class of vLLM with only what makes log-probabilities."""
    handler = kind.__new__(kind)
    handler.return_tokens_as_token_ids = False
    return handler


class Serving:
    """vLLM's ways of making log-probabilities in both APIs, for several choices; `long` leaves them out."""

    def __init__(self, long: long_answers.LongAnswer | None = None) -> None:
        kinds = chat_serving.OpenAIServingChat, completion_serving.OpenAIServingCompletion
        handlers = map(handler_of, kinds)
        self._chat, self._completion = handlers if long is None else map(long.leaving_out, handlers)

    async def chat(self, tokens: int = TOKENS) -> Any:
        made = self._chat._create_chat_logprobs(
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
        made = self._completion._create_completion_logprobs(
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


@pytest.mark.parametrize("dump", DUMPS, ids=str)
@pytest.mark.parametrize("method", ["chat", "completion"])
def test_the_pieces_equal_pydantic_s_json(method: str, dump: dict[str, Any]) -> None:
    """No client sees a difference, late log-probabilities included."""
    want = asyncio.run(getattr(Serving(), method)()).model_dump_json(**dump).encode()

    async def main() -> bytes:
        long = long_answers.LongAnswer(Turns())
        return await long.encode(await getattr(Serving(long), method)(), dump)

    assert asyncio.run(main()) == want


def test_only_a_whole_answer_defers_its_logprobs() -> None:
    """In a stream, or another call of the model, nothing would fill them in later."""
    handler = handler_of(chat_serving.OpenAIServingChat)
    mine = long_answers.LongAnswer(Turns()).leaving_out(handler)
    asked: dict[str, Any] = {"token_ids": range(TOKENS), "top_logprobs": all_logprobs(), "tokenizer": None}
    made, left = (one._create_chat_logprobs(**asked, num_output_top_logprobs=2) for one in (handler, mine))
    assert (len(made.content), left.content) == (TOKENS, None)


def test_the_loop_turns_between_the_pieces() -> None:
    """That is what they are for: a concurrent task runs as often as there are pieces."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def main() -> None:
        counting = asyncio.create_task(count())
        long = long_answers.LongAnswer(Turns(slice_s=0.0))
        await long.encode(await Serving(long).chat(), {})
        counting.cancel()

    asyncio.run(main())
    values = TOKENS * 3 * 2 + TOKENS * 4 + 5000
    assert turns > values / 1000


def test_the_loop_turns_between_many_middling_parts() -> None:
    """Each is short by itself; a hundred choices with log-probabilities would hold up every stream."""
    turns = 0

    class Counted(Turns):
        async def mine(self) -> None:
            nonlocal turns
            turns += 1

    class Choice(BaseModel):
        values: list[int]

    class Answer(BaseModel):
        choices: list[Choice]

    answer = Answer(choices=[Choice(values=list(range(400)))] * 100)
    assert asyncio.run(long_answers.LongAnswer(Counted()).encode(answer, {})) == answer.model_dump_json().encode()
    assert turns >= 100


def test_client_text_is_never_mistaken_for_a_placeholder() -> None:
    """Placeholders are random for each answer."""

    class Simple(BaseModel):
        text: str
        values: list[int]

    answer = Simple(text='0"0"' + "0" * 32, values=list(range(3000)))
    assert asyncio.run(long_answers.LongAnswer(Turns()).encode(answer, {})) == answer.model_dump_json().encode()


def test_a_serving_class_without_logprobs_is_left_unchanged() -> None:
    """Embedding models have neither chat nor completions."""
    assert vars(long_answers.LongAnswer(Turns()).leaving_out(SimpleNamespace(name="embeds"))) == {"name": "embeds"}
