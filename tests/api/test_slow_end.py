"""The end of a stream is final, however slowly its client reads it."""

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.http_writer import StreamWriter

from melld.api import app
from melld.api.answers import Dialect
from melld.api.streams import COMMENT, PING, KeepAlive
from melld.config_server import ServerConfig
from tests.api.contexts import context_of
from tests.patience import PATIENCE_S

SILENCE_S = 0.01


class Spoken:
    """A model that answers with one word."""

    names, adapters = ("m",), ()

    def __init__(self) -> None:
        completions = SimpleNamespace(create_completion=self._create)
        self.serving: Any = SimpleNamespace(args=SimpleNamespace(), openai_serving_completion=completions)

    async def _create(self, *_: object) -> AsyncIterator[str]:
        return self._answer()

    async def _answer(self) -> AsyncIterator[str]:
        yield 'data: {"word": 1}\n\n'

    def called(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check_queue(self, _client: str, _priority: int) -> None:
        """There is always room."""

    def why_closed(self) -> str | None:
        return None

    def status(self) -> Any:
        return None


async def test_no_comment_follows_the_end_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be taken for the start of the next answer on the connection."""

    async def takes_its_time(_: StreamWriter) -> None:
        await asyncio.sleep(20 * SILENCE_S)  # the client reads nothing meanwhile

    monkeypatch.setattr(StreamWriter, "drain", takes_its_time)
    listener = socket.create_server(("127.0.0.1", 0))
    config = ServerConfig(keep_alive_comment_s=SILENCE_S)
    context = dataclasses.replace(context_of([Spoken()]), config=lambda: config)
    body = json.dumps({"model": "m", "prompt": "a", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    async with app.start_api(context, [listener]):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
    assert b'"word": 1' in answer
    assert answer.endswith(b"\r\n0\r\n\r\n"), answer
    assert answer.count(b"\r\n0\r\n\r\n") == 1


@pytest.mark.parametrize(("dialect", "sign"), [(Dialect.OPENAI, COMMENT), (Dialect.ANTHROPIC, PING)])
async def test_a_silent_stream_is_kept_alive_in_its_api_s_way(dialect: Dialect, sign: bytes) -> None:
    """Anthropic's clients may time the gap between events, and comments are not events."""
    written: asyncio.Queue[bytes] = asyncio.Queue()
    request = SimpleNamespace(writer=SimpleNamespace(output_size=0))
    exchange = SimpleNamespace(comment=written.put_nowait, request=request, dialect=dialect)
    with KeepAlive(cast("Any", exchange), SILENCE_S):
        assert await asyncio.wait_for(written.get(), PATIENCE_S) == sign
