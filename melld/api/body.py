"""Reading a request's body: its type, its size and its time are bounded before a byte of it is believed.

A compressed body is counted by what it grows to, chunk by chunk, so that a bomb costs no more than the limit.
"""

import asyncio

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.http_exceptions import BadHttpMessage

from melld.api.answers import Refusal
from melld.config import ServerConfig

ENCODINGS = ("", "identity", "gzip", "deflate")


async def read_body(request: web.BaseRequest, limits: ServerConfig) -> bytes:
    """The whole body of a JSON call.

    Raises:
        Refusal: 415 for a type or encoding that is not served, 413 above `max_body_bytes`, 408 when it does not come in
            `body_timeout_s`, 400 when it is malformed.
    """
    if request.content_type != "application/json":
        raise Refusal(415, "Content-Type must be application/json", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "").lower() not in ENCODINGS:
        raise Refusal(415, "Content-Encoding must be gzip, deflate or absent", code="unsupported_encoding")
    if (request.content_length or 0) > limits.max_body_bytes:
        raise _too_large(limits)
    await _let_go_on(request)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read(request, limits)
    except TimeoutError as error:
        message = f"the body did not come within {limits.body_timeout_s:g} s"
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
    """Answer a client (curl) that asks before it sends a large body, and waits a second for the answer."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # What was written is not yet the response: aiohttp counts it as such.
        request.writer.output_size = 0


def _too_large(limits: ServerConfig) -> Refusal:
    return Refusal(413, f"the body is larger than {limits.max_body_bytes} bytes", code="body_too_large")
