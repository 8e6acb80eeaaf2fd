"""How much one call may ask for: no spelling of a number in JSON gets past a limit, on any route."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from melld.api.answers import Refusal
from melld.api.guards.work import check_work
from melld.config_server import ServerConfig
from tests.api.http_client import MODEL, chat, completion, request
from tests.serve.daemon_process import DaemonProcess

LIMITS = ServerConfig(max_choices=8, max_prompts_per_call=8, max_texts_per_call=8, max_stop_strings=2)


class Completion(BaseModel):
    """The limited fields of vLLM's CompletionRequest, with their types."""

    model_config = ConfigDict(extra="allow")
    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    prompt_embeds: bytes | list[bytes] | None = None
    n: int = 1
    bad_words: list[str] = []
    stop: str | list[str] | None = None
    allowed_token_ids: list[int] | None = None
    vllm_xargs: dict[str, str | list[str | int]] | None = None


class Rerank(BaseModel):
    """The counted fields of vLLM's RerankRequest."""

    query: str
    documents: list[str]


class Response(BaseModel):
    """vLLM's ResponsesRequest has no `n`: it accepts the field and ignores it."""

    model_config = ConfigDict(extra="allow")


def refused(asked: BaseModel) -> str | None:
    """Return the field that is refused."""
    try:
        check_work(asked, LIMITS)
    except Refusal as refusal:
        return refusal.answer.param
    return None


def in_every_type(number: int) -> list[str]:
    """Return a number in every form that pydantic may accept."""
    ways = [str(number), f"{number}.0", f"{number}e0", f'"{number}"', f'"{number}.0"', f'" {number} "']
    return ways + {0: ["false", '"false"'], 1: ["true", '"true"']}.get(number, [])


@given(st.integers(-3, 12) | st.integers(-(2**53), 2**53))
def test_a_limit_holds_however_its_number_is_written(number: int) -> None:
    """`200.0` is 200 to vLLM, so it is 200 to the limit; values within the limit pass in every form too."""
    for text in in_every_type(number):
        try:
            asked = Completion.model_validate(json.loads(f'{{"n": {text}}}'))
        except ValidationError:
            continue  # vLLM does not take it for a number either
        assert refused(asked) == ("n" if number > 8 else None), text


def test_prompts_in_any_form_are_counted() -> None:
    """Strings, token lists and embeddings all count as prompts, each with its choices."""
    assert refused(Completion(prompt=["x"] * 9)) == "prompt"
    assert refused(Completion(prompt=[[1]] * 9)) == "prompt"
    assert refused(Completion(prompt_embeds=[b""] * 9)) == "prompt_embeds"
    assert refused(Completion(prompt=["x"] * 5, prompt_embeds=[b""] * 5)) == "prompt"
    assert refused(Completion(prompt=["x"] * 3, n=4)) == "n"
    assert refused(Completion(prompt=list(range(9)), n=8)) is None
    assert refused(Completion(bad_words=["x"] * 3)) == "bad_words"


@pytest.mark.parametrize(
    ("field", "fits", "does_not"),
    [
        ("stop", "x" * 100_000, "x" * 100_001),
        ("stop", ["x" * 50_000] * 2, ["x" * 50_001] * 2),
        ("bad_words", ["x" * 10_000] * 2, ["x" * 10_001] * 2),
        ("vllm_xargs", {"a": "x" * 99_999}, {"a": ["x" * 100_000, 1]}),
        ("allowed_token_ids", [1] * 62_500, [1] * 62_501),
    ],
)
def test_each_prompt_of_a_call_keeps_little_memory(field: str, fits: object, does_not: object) -> None:
    """A body of some megabytes with many prompts must not take gigabytes of the daemon's memory."""
    prompts = {"prompt": ["x"] * 8}
    assert refused(Completion(**prompts, **{field: fits})) is None
    assert refused(Completion(**prompts, **{field: does_not})) == field


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_unknown_fields_may_hold_anything(value: Any) -> None:
    """They have no effect on the route, so they must not break it either."""
    assert refused(Response(n=value, prompt=value, stop=value)) is None


def test_texts_to_compare_are_counted() -> None:
    """Each of them costs a computation."""
    assert refused(Rerank(query="x", documents=["x"] * 8)) == "documents"
    assert refused(Rerank(query="x", documents=["x"] * 7)) is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_the_configured_number_of_stop_strings_is_the_limit(strict: DaemonProcess, path: str) -> None:
    """Agents send a dozen."""
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    for count, status in ((64, 200), (65, 400)):
        asked = ROUTES[path] | {"model": MODEL, name: [f"word {number}" for number in range(count)]}
        answer = request(strict.url, "POST", path, asked)
        assert answer.status == status, answer.body
    assert "at most 64" in answer.json()["error"]["message"]


MESSAGES = chat()["messages"]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": completion(),
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": chat(),
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES},
    "/v1/embeddings": {"input": "x"},
    "/v2/embed": {"texts": ["x"]},
    "/score": {"queries": "x", "documents": "y"},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    **{key: {"query": "x", "documents": ["y"]} for key in ("/rerank", "/v1/rerank", "/v2/rerank")},
    "/classify": {"input": "x"},
    "/pooling": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
KNOW_CHOICES = ("/v1/chat/completions", "/v1/completions")
COMPUTE_NOTHING = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")
KNOW_PRIORITY = tuple(path for path in ROUTES if path not in COMPUTE_NOTHING)


@pytest.mark.parametrize("path", ROUTES)
def test_limits_hold_on_every_route(strict: DaemonProcess, path: str) -> None:
    """One small call cannot ask for two hundred answers or jump the queue, in any JSON type.

    Of forms: `tests/migrate/test_audio`.
    """
    described = json.loads(request(strict.url, "GET", "/openapi.json").body)["paths"]
    posted = {name for name, methods in described.items() if "post" in methods and "/audio/" not in name}
    assert {name for name in posted if "{" not in name} == ROUTES.keys()  # the others have no body
    for name, number, knowing in (("n", 200, KNOW_CHOICES), ("priority", -1000, KNOW_PRIORITY)):
        for text in in_every_type(number):
            body = json.dumps(ROUTES[path])[:-1] + f', "{name}": {text}}}'
            answer = request(strict.url, "POST", path, body.encode())
            if path in knowing:
                assert answer.status == 400, (text, answer.body)
                assert name in answer.json()["error"]["message"], (text, answer.body)
            else:
                assert answer.status in (200, 400), (text, answer.body)
