"""Calls to a model that is not loaded wait for it: silently, or in a stream that has begun."""

import asyncio
import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiohttp import ClientConnectionResetError

from melld.api import app
from melld.control.status import ModelState, ModelStatus
from melld.daemon.model import ModelNotLoaded
from tests.api.contexts import context_of
from tests.patience import PATIENCE_S


class Absent:
    """A model that cannot be loaded, which is noticed once `known` is set."""

    names, adapters = ("slow",), ("pirate",)
    serving: Any = None

    def __init__(self, failure: Exception | None = None) -> None:
        self.asked = asyncio.Event()
        self.known = asyncio.Event()
        self._failure = failure or ModelNotLoaded("slow could not be loaded: no weights", 7.0)

    def called(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def until_loaded(self) -> None:
        self.asked.set()
        await self.known.wait()
        raise self._failure

    def check_queue(self, _client: str, _priority: int) -> None:
        """There is always room."""

    def why_closed(self) -> str | None:
        return None

    def status(self) -> ModelStatus:
        return ModelStatus(model="slow", names=self.names, state=ModelState.FAILED)


@contextlib.asynccontextmanager
async def served(model: Absent) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    async with app.start_api(context_of([model]), [listener]):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"


def post(url: str, body: bytes) -> urllib.request.Request:
    return urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310  a URL of ours


async def test_a_stream_begins_before_its_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy cuts it; later failures are reported in it."""
    monkeypatch.setattr(app, "LOADING_HEAD_AFTER_S", 0.0)
    model = Absent()
    async with served(model) as url:
        asked = post(url, b'{"model": "slow", "prompt": "a", "stream": true}')
        answer = await asyncio.to_thread(urllib.request.urlopen, asked, timeout=PATIENCE_S)
        with answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            assert await asyncio.to_thread(answer.readline) == b": keep-alive\n"
            model.known.set()
            rest = (await asyncio.to_thread(answer.read)).decode()
    assert "event: error" in rest
    assert "slow could not be loaded: no weights" in rest


async def test_a_non_streaming_call_is_not_answered_with_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints without `stream` ignore it, whatever becomes of the model."""
    monkeypatch.setattr(app, "LOADING_HEAD_AFTER_S", 0.0)
    model = Absent()
    async with served(model) as url:
        asked = post(url.replace("completions", "embeddings"), b'{"model": "slow", "input": "a", "stream": true}')
        calling = asyncio.ensure_future(asyncio.to_thread(urllib.request.urlopen, asked, timeout=PATIENCE_S))
        await asyncio.wait_for(model.asked.wait(), PATIENCE_S)
        for _turn in range(10):  # of the loop: the head of a stream would be sent by now
            await asyncio.sleep(0)
        model.known.set()
        with pytest.raises(urllib.error.HTTPError) as refused:
            await calling
    with refused.value as error:
        assert (error.code, json.load(error)["error"]["code"]) == (503, "model_not_loaded")


@pytest.mark.parametrize("name", ["slow", "pirate"])
async def test_a_call_is_told_why_its_model_is_missing(name: str) -> None:
    """And when to try again; a call for one of its adapters has it loaded, too."""
    model = Absent()
    async with served(model) as url:
        calling = asyncio.ensure_future(
            asyncio.to_thread(
                urllib.request.urlopen, post(url, b'{"model": "%b", "prompt": "a"}' % name.encode()), timeout=PATIENCE_S
            )
        )
        await asyncio.wait_for(model.asked.wait(), PATIENCE_S)
        model.known.set()
        with pytest.raises(urllib.error.HTTPError) as refused:
            await calling
    with refused.value as error:
        assert (error.code, error.headers["Retry-After"]) == (503, "7")
        assert b"model_not_loaded" in error.read()


async def test_a_model_is_listed_in_full_before_it_is_loaded() -> None:
    """OpenAI's clients read all fields of a model, including `created`."""
    async with served(Absent()) as url, openai.AsyncOpenAI(base_url=url.rpartition("/")[0], api_key="none") as client:
        card, adapter = (await client.models.list()).data
        one = await client.models.retrieve("slow")
        with pytest.raises(openai.NotFoundError, match="available: slow, pirate"):
            await client.completions.create(model="other", prompt="a")
    needed = {name for name, field in openai.types.Model.model_fields.items() if field.is_required()}
    assert needed - card.model_fields_set == needed - one.model_fields_set == set()
    assert (card.id, card.object, card.model_extra["status"]) == ("slow", "model", "failed")
    assert (adapter.id, adapter.parent) == ("pirate", "slow")


async def test_a_lost_connection_to_a_media_server_is_not_a_lost_client() -> None:
    """An image server that hangs up leads to an answer, and no client is counted as gone."""
    model = Absent(ClientConnectionResetError("Cannot write to closing transport"))
    model.known.set()
    async with served(model) as url:
        calling = asyncio.to_thread(
            urllib.request.urlopen, post(url, b'{"model": "slow", "prompt": "a"}'), timeout=PATIENCE_S
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            await calling
    with refused.value as error:
        assert (error.code, json.load(error)["error"]["code"]) == (502, "media_not_fetched")
