"""Reads forms, in which audio is uploaded.

Owns the way from such a body to fields as `melld.api.calls` parses them.  The file stays in memory: bodies are bounded.
"""

import asyncio
import io
from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from melld.api.answers import Refusal, bad

FORM = "multipart/form-data"
MAX_FIELDS = 64
PIECE_BYTES = 1 << 20
"""Read in one turn of the event loop: a millisecond."""


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
