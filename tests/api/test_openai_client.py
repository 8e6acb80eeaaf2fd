"""What users of the official clients rely on, against a real daemon with two CPU workers."""

import asyncio
import collections
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.api.http_client import MODEL, request
from tests.conftest import OTHER_NAME
from tests.serve.daemon_process import DaemonProcess

ANSWER_TOKENS = 128
"""The `max_new_tokens` of the demo model."""
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How are you?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LOOK: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {"type": "object", "properties": {"where": {"enum": ["here", "there"]}}, "required": ["where"]},
    },
}


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(daemon: DaemonProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    """User interfaces fill their menus from this."""
    assert [model.id for model in client.models.list()] == [MODEL, OTHER_NAME]
    assert client.models.retrieve(MODEL).id == MODEL
    assert client.models.retrieve(OTHER_NAME).id == OTHER_NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_model_answers_to_each_of_its_names(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    """Programs with one fixed name need no change; answers and metrics carry the first name, as vLLM's do."""
    for name in (MODEL, OTHER_NAME):
        assert client.chat.completions.create(model=name, messages=QUESTION, max_tokens=1).model == MODEL
    status = daemon.status()
    assert (status["model"], status["models"]) == (MODEL, [MODEL, OTHER_NAME])
    assert OTHER_NAME in daemon.melld("status").stdout
    assert f'model_name="{MODEL}"' in daemon.get("/metrics")


def test_a_chat_counts_its_tokens(client: openai.OpenAI) -> None:
    """Usage is what people pay and plan by."""
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=7)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_an_answer_of_the_demo_model_ends_by_itself(client: openai.OpenAI) -> None:
    """A newcomer's first question sets no limit and is answered in about a second; an explicit limit is respected."""
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == ANSWER_TOKENS
    longer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=ANSWER_TOKENS + 1)
    assert longer.usage is not None
    assert longer.usage.completion_tokens == ANSWER_TOKENS + 1


def test_a_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    """Streaming changes when text comes, not which; usage comes last when requested."""
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=20, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI) -> None:
    """Sampled answers can be repeated."""

    def text(seed: int) -> str | None:
        made = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=20, seed=seed, temperature=1)
        return made.choices[0].message.content

    assert text(1) == text(1) != text(2)


def test_n_answers_differ_and_each_is_complete(client: openai.OpenAI) -> None:
    """One call gives several answers to choose from."""
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_n_answers_come_interleaved_in_a_stream(client: openai.OpenAI) -> None:
    """Each chunk says which answer it belongs to, and each answer ends once."""
    stream = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, n=2, stream=True)
    ended = [choice.index for chunk in stream for choice in chunk.choices if choice.finish_reason]
    assert sorted(ended) == [0, 1]


def test_logprobs_come_with_every_token(client: openai.OpenAI) -> None:
    """Evaluations read probabilities, not only text."""
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=5, logprobs=True, top_logprobs=3, temperature=0
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 5
    for token in found.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(other.logprob for other in token.top_logprobs)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    """Prompts that delimit their answers get what they asked for."""
    whole = client.completions.create(model=MODEL, prompt="Once", max_tokens=30, temperature=0).choices[0].text
    stop = whole[10:14]
    cut = client.completions.create(model=MODEL, prompt="Once", max_tokens=30, temperature=0, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_completions_take_several_prompts_and_stream(client: openai.OpenAI) -> None:
    """Batch tools send lists."""
    whole = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=6, temperature=0)
    texts = ["", ""]
    for chunk in client.completions.create(
        model=MODEL, prompt=["One", "Two"], max_tokens=6, temperature=0, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_a_json_schema_is_obeyed(client: openai.OpenAI) -> None:
    """A program can parse the answer blindly."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=400,
        seed=13,  # with which an answer by chance ends early
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_an_ordinary_recursive_schema_is_served(client: openai.OpenAI) -> None:
    """Trees are legitimate: only a reference that describes nothing is refused."""
    tree = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": []}},
        "$ref": "#/$defs/node",
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=5,
        response_format={"type": "json_schema", "json_schema": {"name": "tree", "schema": tree}},
    )
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_demanded_tool_is_called_with_valid_arguments(client: openai.OpenAI, choice: Any, streamed: bool) -> None:
    """Agents act on what the call says."""
    common: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 400, "tools": [LOOK]}
    common["seed"] = 16  # with which an answer by chance ends early
    names: dict[int, str] = collections.defaultdict(str)
    arguments: dict[int, str] = collections.defaultdict(str)
    if streamed:
        for chunk in client.chat.completions.create(**common, tool_choice=choice, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                names[call.index] += call.function.name or ""
                arguments[call.index] += call.function.arguments or ""
    else:
        calls = client.chat.completions.create(**common, tool_choice=choice).choices[0].message.tool_calls
        for index, call in enumerate(calls or ()):
            names[index], arguments[index] = call.function.name, call.function.arguments
    assert set(names.values()) == {"look"}
    assert all(json.loads(text)["where"] in ("here", "there") for text in arguments.values())


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    """The newer API of OpenAI's clients is served too."""
    whole = client.responses.create(model=MODEL, input="How are you?", max_output_tokens=12, temperature=0)
    events = list(
        client.responses.create(model=MODEL, input="How are you?", max_output_tokens=12, temperature=0, stream=True)
    )
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"


def test_embeddings_of_a_generative_model_are_refused_once(client: openai.OpenAI) -> None:
    """A client error, which clients do not retry."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=MODEL, input="x")
    assert refused.value.param == "model"
    assert "Embeddings" in refused.value.message


def test_errors_raise_the_client_s_own_exceptions(client: openai.OpenAI) -> None:
    """Code that handles OpenAI's errors handles melld's."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1, stream=True)
    assert bad.value.param == "temperature"


def test_a_client_s_request_id_is_kept(client: openai.OpenAI) -> None:
    """One id follows a request through the client's logs, the daemon's and the answer, even an error or a list."""
    named = {"X-Request-Id": "mine:1"}
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=1, extra_headers=named
    )
    assert answer.headers["x-request-id"] == "mine:1"
    assert answer.parse().id == "chatcmpl-mine:1"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=QUESTION, extra_headers=named)
    assert missing.value.request_id == "mine:1"
    assert client.models.with_raw_response.list(extra_headers=named).headers["x-request-id"] == "mine:1"
    assert client.models.with_raw_response.list().headers["x-request-id"]


def test_an_empty_request_id_counts_as_none(client: openai.OpenAI) -> None:
    """Some proxies forward a header that they did not get."""
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt="Hi", max_tokens=1, extra_headers={"X-Request-Id": ""}
    )
    assert answer.headers["x-request-id"]


def test_anthropics_client_whole_and_streamed(daemon: DaemonProcess) -> None:
    """Tools written for Anthropic's Messages API work unchanged."""
    import anthropic  # two seconds, for whoever runs this test

    with anthropic.Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        common: dict[str, Any] = {"model": MODEL, "max_tokens": 10, "extra_body": {"temperature": 0}}
        asked: list[Any] = [{"role": "user", "content": "How are you?"}]
        whole = client.messages.create(messages=asked, **common)
        with client.messages.stream(messages=asked, **common) as stream:
            streamed = stream.get_final_message()
        assert streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
        assert streamed.usage.output_tokens == whole.usage.output_tokens == 10
        assert client.messages.count_tokens(model=MODEL, messages=asked).input_tokens == whole.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", max_tokens=1, messages=asked)


def test_tokenize_and_detokenize_round_trip(daemon: DaemonProcess) -> None:
    """What a client counts before it asks is what the daemon counts."""
    tokens = request(daemon.url, "POST", "/tokenize", {"model": MODEL, "prompt": "Hello, world"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    text = request(daemon.url, "POST", "/detokenize", {"model": MODEL, "tokens": tokens["tokens"]}).json()
    assert "Hello, world" in text["prompt"]


async def test_many_streams_at_once_are_each_complete(async_client: openai.AsyncOpenAI) -> None:
    """Sixteen readers at a time get sixteen whole answers."""

    async def one(seed: int) -> int:
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=30, seed=seed, stream=True, extra_body={"ignore_eos": True}
        )
        return len([chunk async for chunk in stream if chunk.choices[0].finish_reason == "length"])

    assert await asyncio.gather(*(one(seed) for seed in range(16))) == [1] * 16


async def test_async_calls_are_served_side_by_side(async_client: openai.AsyncOpenAI) -> None:
    """The asynchronous client gets what the other gets."""
    answers = await asyncio.gather(
        *(async_client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=5) for _ in range(4))
    )
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [5] * 4
