"""A relay in front of the daemon that changes no byte: records requests, and signals when an answer is half-way."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools


class Asked(NamedTuple):
    """One request, as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class _Parser:
    """Turns a connection's bytes into requests."""

    def __init__(self, asked: list[Asked]) -> None:
        self._asked = asked
        self._parser = httptools.HttpRequestParser(self)
        self.feed = self._parser.feed_data

    def on_message_begin(self) -> None:
        self._path, self._headers, self._body = b"", dict[str, str](), b""

    def on_url(self, part: bytes) -> None:
        self._path += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        self._asked.append(Asked(method, self._path.decode(), self._headers, self._body))


class Recorder:
    """Serves on a port of its own, for one client and one task."""

    def __init__(self, upstream: str, sign: bytes, seen: Callable[[], Any]) -> None:
        """`seen` is called once, when `sign` is in what the daemon answers."""
        self._upstream, self._sign, self._seen = urlsplit(upstream), sign, seen
        self.asked: list[Asked] = []
        self.statuses: list[int] = []
        self.has_seen = False

    async def __aenter__(self) -> "Recorder":
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, questions = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        parser = _Parser(self.asked)
        ways = [
            asyncio.create_task(_copy(reader, questions, parser.feed)),
            asyncio.create_task(_copy(answers, writer, self._note_answer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (questions, writer):
            end.close()

    def _note_answer(self, data: bytes) -> None:
        self.statuses += map(int, re.findall(rb"HTTP/1\.1 (\d{3})", data))
        if self._sign in data and not self.has_seen:
            self.has_seen = True
            self._seen()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[bytes], None]) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            with contextlib.suppress(httptools.HttpParserError):  # what is not HTTP/1.1 is relayed all the same
                note(data)
            writer.write(data)
            await writer.drain()
