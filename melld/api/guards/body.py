"""Reads a request's body within limits of type, size and time, and the fields of a form, in which audio is uploaded.

The file of a form stays in memory: bodies are bounded.
"""

import asyncio
import io
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


async def read_body(request: web.BaseRequest, limits: ServerConfig, media_type: str = JSON) -> bytes:
    """Read the whole body of a call that takes this type.

    Raises:
        Refusal: 415 for an unsupported type or encoding, 413 above `max_body_bytes`, 408 after `body_timeout_s`, 400
            if it is malformed.
    """
    if request.content_type != media_type:
        raise Refusal(415, f"Content-Type must be {media_type}", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "").lower() not in ("", "identity"):
        raise Refusal(415, "compressed bodies are not supported: remove Content-Encoding", code="unsupported_encoding")
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
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise Refusal(408, message, code="request_timeout") from error
    except (web.RequestPayloadError, BadHttpMessage) as error:
        raise Refusal(400, f"the body cannot be read: {error}", code="malformed_body") from error


async def _read(request: web.BaseRequest, limits: ServerConfig) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := await request.content.readany():
        size += len(chunk)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _let_go_on(request: web.BaseRequest) -> None:
    """Answer `Expect: 100-continue`: curl sends it before a large body and waits a second for the reply."""
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
        raise Refusal(400, f"the form is invalid: {error.message}", code="malformed_body") from error
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name.endswith("[]"):
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = value
    file = fields.get("file")
    if not isinstance(file, UploadFile):
        raise bad("file", "file must contain the audio and have a file name")
    with file.file:
        return fields | {"file": UploadFile(io.BytesIO(file.file.read()))}


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]
        await asyncio.sleep(0)
