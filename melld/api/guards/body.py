"""Reads a request's body within limits of type, size and time, and the fields of a form, in which audio is uploaded.

A compressed body is decompressed no further than the limit, so that a bomb costs no more than a body of that size.  The
file of a form stays in memory: bodies are bounded.
"""

import asyncio
import io
import zlib
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.http_exceptions import BadHttpMessage
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from melld.api.answers import JSON, Refusal, bad
from melld.api.connections.patience import Patience
from melld.config_server import ServerConfig

FORM = "multipart/form-data"
MAX_FIELDS = 64
PIECE_BYTES = 1 << 20
"""Read in one turn of the event loop: a millisecond."""
_ZLIB = ("gzip", "deflate")
ENCODINGS = ("", "identity", *_ZLIB)
MAX_GZIP_MEMBERS = 1024
"""Each costs the event loop 6 us, however little it holds.  `bgzip` makes one for each 64 KiB."""


async def read_body(request: web.BaseRequest, limits: ServerConfig, media_type: str = JSON) -> bytes:
    """Read the whole body of a call that takes this type.

    Raises:
        Refusal: 415 for an unsupported type or encoding, 413 above `max_body_bytes`, 408 after `body_timeout_s`, 400
            if it is malformed.
    """
    if request.content_type != media_type:
        raise Refusal(415, f"Content-Type must be {media_type}", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "").lower() not in ENCODINGS:
        raise Refusal(415, "Content-Encoding must be gzip, deflate or absent", code="unsupported_encoding")
    if (request.content_length or 0) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        if request.content.is_eof():  # it came with the head: nothing to wait for
            return await _read(request, limits)
        await _let_go_on(request)
        async with asyncio.timeout(None) as late:
            timer = Patience(limits.body_timeout_s, lambda: late.reschedule(0.0))
            try:
                return await _read(request, limits)
            finally:
                timer.cancel()
    except TimeoutError as error:
        message = f"the body did not come within {limits.body_timeout_s:g} s"
        raise Refusal(408, message, code="request_timeout") from error
    except (web.RequestPayloadError, BadHttpMessage, zlib.error) as error:
        raise Refusal(400, f"the body cannot be read: {error}", code="malformed_body") from error


async def _read(request: web.BaseRequest, limits: ServerConfig) -> bytes:
    chunks: list[bytes] = []
    size = 0
    inflate = _Inflate(limits.max_body_bytes) if request.headers.get("Content-Encoding", "").lower() in _ZLIB else None
    while chunk := await request.content.readany():
        piece = chunk if inflate is None else inflate.feed(chunk)
        size += len(piece)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        chunks.append(piece)
    if inflate is not None and not inflate.complete:
        raise zlib.error("it is cut short")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class _Inflate:
    """The members of a gzip file (RFC 1952), or a zlib stream, decompressed to one byte beyond the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes + 1
        self._members = 0
        self._begin()

    def _begin(self) -> None:
        self._stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | (32 if self._members == 0 else 16))
        self._members += 1
        if self._members > MAX_GZIP_MEMBERS:
            raise zlib.error(f"it has more than {MAX_GZIP_MEMBERS} gzip members")

    def feed(self, chunk: bytes) -> bytes:
        pieces = []
        while self._left_bytes:
            if self._stream.eof:
                chunk = chunk.lstrip(b"\0")  # padding between members, as the gzip program takes it
                if chunk:
                    self._begin()
            if not chunk:
                break
            pieces.append(self._stream.decompress(chunk, self._left_bytes))
            self._left_bytes -= len(pieces[-1])
            chunk = self._stream.unused_data
        return b"".join(pieces)

    @property
    def complete(self) -> bool:
        return self._stream.eof


async def _let_go_on(request: web.BaseRequest) -> None:
    """Answer a client (curl) that asks before it sends a large body, and waits a second for the answer."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # aiohttp would count this as part of the response.
        request.writer.output_size = 0


def _too_large(limits: ServerConfig) -> Refusal:
    return Refusal(413, f"the body is larger than {limits.max_body_bytes} bytes", code="body_too_large")


class _InMemory(MultiPartParser):
    spool_max_size = 0  # of a file on disk: none


async def parse_form(content_type: str, body: bytes) -> dict[str, Any]:
    """Return the fields of a form: its file, texts, and lists, whose names end in `[]`.

    Raises:
        Refusal: 400, it is malformed or has no file.
    """
    headers = Headers({"Content-Type": content_type})
    parser = _InMemory(headers, _pieces(body), max_files=1, max_fields=MAX_FIELDS)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refusal(400, f"the form cannot be read: {error.message}", code="malformed_body") from error
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name.endswith("[]"):
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = value
    file = fields.get("file")
    if not isinstance(file, UploadFile):
        raise bad("file", "file holds the audio, with a file name")
    with file.file:
        return fields | {"file": UploadFile(io.BytesIO(file.file.read()))}


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]
        await asyncio.sleep(0)
