"""Stored answers of `/v1/responses`: separate for each key, limited in number and size."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from melld.api.answers import Answer, Refusal
from melld.api.keeping import Keeping
from melld.api.keys import Client, Keys
from melld.api.stored_responses import Stored, StoredResponses
from melld.config_server import ServerConfig
from melld.engine.frontend.turns import Turns
from tests.api.http_client import MODEL, request
from tests.api.test_streams import until
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import slowed

LIMITS = ServerConfig(max_stored_responses=3, max_stored_response_bytes=10)
LONG = {"input": "How are you?", "temperature": 0, "max_output_tokens": 100, "extra_body": {"ignore_eos": True}}
SLOW_S = 0.05
"""By how much each of its steps is longer, so that it still runs when whoever looks for it has found it."""


def stored(size: int = 1, status: str = "completed", **fields: Any) -> Stored:
    return Stored(body=json.dumps({"status": status}).encode(), messages=[], size=size, **fields)


def kept(store: StoredResponses, owner: bytes, names: str) -> str:
    """Return which of the names are stored."""
    there = ""
    for name in names:
        with contextlib.suppress(Refusal):
            store.find(owner, name)
            there += name
    return there


@given(
    puts=st.lists(
        st.tuples(st.sampled_from([b"one", b"two"]), st.sampled_from("abcdef"), st.integers(1, 12), st.booleans())
    )
)
def test_each_key_s_latest_answers_are_stored_within_the_limits(puts: list[tuple[bytes, str, int, bool]]) -> None:
    """In any order, the limits hold except for answers in progress, and no key evicts another's."""
    store = StoredResponses(lambda: LIMITS, lambda: {b"one", b"two"})
    expected: dict[bytes, list[tuple[str, int, bool]]] = {b"one": [], b"two": []}
    for owner, name, size, is_done in puts:
        store.put(owner, name, stored(size, is_done=is_done))
        mine = [one for one in expected[owner] if one[0] != name] + [(name, size, is_done)]
        while len(mine) > 3 or sum(one[1] for one in mine) > 10:
            done = [one for one in mine if one[2]]
            if not done:
                break
            mine.remove(done[0])
        expected[owner] = mine
        for each, wanted in expected.items():
            assert set(kept(store, each, "abcdef")) == {one[0] for one in wanted}


def test_a_removed_key_s_answers_are_dropped() -> None:
    """Rotating keys daily does not fill the memory with what nobody can fetch."""
    clients = {b"1": Client("key0", owner=b"old"), b"2": Client("key1", owner=b"new")}
    store = StoredResponses(lambda: LIMITS, Keys(clients).owners)
    store.put(b"old", "a", stored())
    store.put(b"new", "b", stored())
    assert (kept(store, b"old", "a"), kept(store, b"new", "b")) == ("a", "b")
    del clients[b"1"]
    store.put(b"new", "c", stored())
    assert (kept(store, b"old", "a"), kept(store, b"new", "bc")) == ("", "bc")


def test_a_finished_answer_cannot_be_cancelled_and_a_failed_one_says_why() -> None:
    """A client learns how its answer ended, whoever ended it first."""
    store = StoredResponses(lambda: LIMITS, Keys().owners)
    store.put(b"", "a", stored(background=True))
    store.put(b"", "b", stored(status="queued", background=True, is_done=False))
    with pytest.raises(Refusal) as done:
        store.cancel(b"", "a")
    assert done.value.answer.status == 409
    with pytest.raises(Refusal) as running:
        store.check_new(b"", "b")
    assert running.value.answer.status == 409
    found = store.find(b"", "b")
    found.fail(Answer(503, "no worker", code="no_worker"))
    assert found.said() == {"status": "failed", "error": {"code": "no_worker", "message": "no worker"}}
    store.put(b"", "c", stored(status="queued", background=True, is_done=False))
    assert json.loads(store.cancel(b"", "c")) == {"status": "cancelled"} == json.loads(store.cancel(b"", "c"))
    store.find(b"", "c").fail(Answer(500, "too late"))
    assert store.find(b"", "c").said() == {"status": "cancelled"}


@given(cuts=st.lists(st.integers(0, 6), min_size=1, max_size=4), steps=st.lists(st.booleans(), max_size=8))
def test_a_follower_gets_every_event_after_the_one_it_names(cuts: list[int], steps: list[bool]) -> None:
    """Whether it joins before, during or after them, in any interleaving of readers and writer."""

    async def read(one: Stored, after: int) -> list[str]:
        return [event async for event in one.follow(after)]

    async def run() -> None:
        one = stored(is_done=False, events=[])
        readers = []
        for number in range(6):
            readers += [asyncio.create_task(read(one, cut - 1)) for cut in cuts if cut == number]
            if number < len(steps) and steps[number]:
                await asyncio.sleep(0)
            one.add(str(number), None)
        one.done(b"{}")
        one.add("too late", None)
        readers += [asyncio.create_task(read(one, cut - 1)) for cut in cuts if cut == 6]
        for cut, reader in zip(sorted(cuts), readers, strict=True):
            assert await reader == list(map(str, range(cut, 6)))

    asyncio.run(run())


def test_a_follower_learns_how_an_answer_failed() -> None:
    """After the events; a cancelled answer just ends."""

    async def read(one: Stored) -> list[str]:
        return [event async for event in one.follow()]

    failed, cancelled = (stored(is_done=False, events=["a"]) for _ in "ab")
    failed.fail(Answer(503, "no worker", code="no_worker"))
    with pytest.raises(Refusal) as told:
        asyncio.run(read(failed))
    assert (told.value.answer.status, told.value.answer.code) == (503, "no_worker")
    cancelled.end(status="cancelled")
    assert asyncio.run(read(cancelled)) == ["a"]


def test_the_copy_of_a_serving_class_is_freed_with_its_call() -> None:
    """It holds whole conversations, which must not wait for the garbage collector."""

    class Serving:
        """Stand-in for vLLM's serving class."""

    asked = ResponsesRequest(input="x")
    keeping = Keeping(StoredResponses(lambda: LIMITS, Keys().owners), b"", asked, 1, contextlib.nullcontext, Turns())
    gc.disable()
    try:
        gone = weakref.ref(keeping.serving(Serving()))
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_can_be_fetched_and_continued(client: openai.OpenAI, streamed: bool) -> None:
    """The next answer is that of the whole conversation, as if the client had sent it."""
    asked: dict[str, Any] = {"model": MODEL, "input": "How are you?", "max_output_tokens": 8, "temperature": 0}
    if streamed:
        first = list(client.responses.create(**asked, stream=True))[-1].response  # type: ignore[union-attr]
    else:
        first = client.responses.create(**asked)
    assert client.responses.retrieve(first.id) == first
    next_one = client.responses.create(**asked | {"input": "And now?"}, previous_response_id=first.id)
    said = [("user", "How are you?"), ("assistant", first.output_text), ("user", "And now?")]
    whole = client.responses.create(**asked | {"input": [{"role": role, "content": text} for role, text in said]})
    assert next_one.usage is not None
    assert whole.usage is not None
    assert (next_one.output_text, next_one.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    third = client.responses.create(**asked | {"input": "More?"}, previous_response_id=next_one.id)
    assert third.usage is not None
    assert third.usage.input_tokens > next_one.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_an_answer_with_store_false_is_not_stored(client: openai.OpenAI) -> None:
    """`store` defaults to true, as with OpenAI."""
    answer = client.responses.create(model=MODEL, input="x", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
    assert (gone.value.param, gone.value.code) == ("previous_response_id", "response_not_found")


def test_a_background_answer_survives_its_worker(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    """No connection is held; the text equals that of a waiting call."""
    whole = client.responses.create(model=MODEL, **LONG)
    with slowed(daemon.faults, SLOW_S):
        answer = client.responses.create(model=MODEL, **LONG, background=True)
        assert (answer.status, answer.output) == ("queued", [])

        def homes() -> set[str]:
            """Return where its request has made a token."""
            running = daemon.status()["requests"]
            return {one["worker"] for one in running if answer.id in one["request"] and one["output_tokens"]}

        until(lambda: bool(homes()))
        [pid] = [one["pid"] for one in daemon.status()["workers"] if one["worker"] in homes()]
        os.kill(pid, signal.SIGKILL)
    until(lambda: client.responses.retrieve(answer.id).status != "queued")
    answer = client.responses.retrieve(answer.id)
    assert (answer.status, answer.background) == ("incomplete", True)
    assert answer.output_text == whole.output_text
    until(lambda: all(one["state"] == "ready" for one in daemon.status()["workers"]))


def test_a_background_answer_can_be_cancelled(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    """Its request ends, and fetching it says so."""
    with slowed(daemon.faults, SLOW_S):
        answer = client.responses.create(model=MODEL, **LONG, background=True)
        with pytest.raises(openai.ConflictError):
            client.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
        for _ in "twice":
            assert client.responses.cancel(answer.id).status == "cancelled"
        until(lambda: not daemon.status()["requests"])
    assert client.responses.retrieve(answer.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="x", previous_response_id=answer.id)


def test_a_background_stream_goes_on_without_its_reader(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    """Client and worker are both lost; whoever reconnects gets the rest, and later all of it."""
    whole = list(client.responses.create(model=MODEL, **LONG, stream=True))
    with slowed(daemon.faults, SLOW_S):
        with client.responses.create(model=MODEL, **LONG, background=True, stream=True) as left:
            first = [event for _, event in zip(range(12), left, strict=False)]
        response_id = first[0].response.id  # type: ignore[union-attr]
        assert client.responses.retrieve(response_id).status == "in_progress"
        [home] = [one["worker"] for one in daemon.status()["requests"] if response_id in one["request"]]
        [pid] = [one["pid"] for one in daemon.status()["workers"] if one["worker"] == home]
        os.kill(pid, signal.SIGKILL)
    seen = first[-1].sequence_number
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=seen))
    assert [event.sequence_number for event in rest] == list(range(seen + 1, seen + 1 + len(rest)))
    assert said([*first, *rest]) == said(whole)
    assert list(client.responses.retrieve(response_id, stream=True)) == [*first, *rest]
    answer = client.responses.retrieve(response_id)
    assert (answer.status, answer.output_text, answer.background) == ("incomplete", said(whole), True)
    until(lambda: all(one["state"] == "ready" for one in daemon.status()["workers"]))


def said(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_a_background_stream_ends_when_it_is_cancelled(client: openai.OpenAI, daemon: DaemonProcess) -> None:
    """Nobody is left waiting for events that will not come."""
    with slowed(daemon.faults, SLOW_S):
        with client.responses.create(model=MODEL, **LONG, background=True, stream=True) as stream:
            response_id = next(iter(stream)).response.id  # type: ignore[union-attr]
            client.responses.cancel(response_id)
            assert said(list(stream)) in said(list(client.responses.retrieve(response_id, stream=True)))
        until(lambda: not daemon.status()["requests"])
    assert client.responses.retrieve(response_id).status == "cancelled"


def test_only_a_background_stream_can_be_resumed(client: openai.OpenAI) -> None:
    """Other streams' events are not kept, and no event has such a number."""
    answer = client.responses.create(model=MODEL, input="x", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(answer.id, stream=True)
    assert refused.value.param == "stream"
    kept = client.responses.create(model=MODEL, input="x", max_output_tokens=2, background=True, stream=True)
    response_id = next(iter(kept)).response.id  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(response_id, stream=True, starting_after=-1)
    assert refused.value.param == "starting_after"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/responses/resp_none", None, 404, "response_not_found"),
        ("DELETE", "/v1/responses/resp_none", None, 404, "response_not_found"),
        ("POST", "/v1/responses/resp_none/cancel", {}, 404, "response_not_found"),
        ("GET", "/v1/responses/resp_none/input_items", None, 404, "unknown_path"),
        ("POST", "/v1/responses/resp_none", {}, 405, "method_not_allowed"),
        ("GET", "/v1/responses/resp_none?stream=true", None, 404, "response_not_found"),
        ("POST", "/v1/responses", {"input": "x", "background": True, "store": False}, 400, None),
    ],
)
def test_impossible_combinations_are_refused(
    daemon: DaemonProcess, method: str, path: str, body: Any, status: int, code: str | None
) -> None:
    """By name, and before any work."""
    answer = request(daemon.url, method, path, body)
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)


def test_an_answer_that_its_client_awaited_cannot_be_cancelled(client: openai.OpenAI) -> None:
    """It is already there."""
    answer = client.responses.create(model=MODEL, input="x", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.cancel(answer.id)
    assert refused.value.code == "not_in_background"
