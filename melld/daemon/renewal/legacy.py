"""The handover file: stored responses and the stories of finished requests, for the next daemon.

Owns the file: its mode is 0600, as it contains clients' texts, and its reader removes it.  Its size is bounded by those
who provide the content.
"""

import os
import tempfile
from pathlib import Path

import msgspec

from melld.api.stored_responses import LeftResponse
from melld.decisions.stories import Story
from melld.errors import MelldError

FILE = "left.msgpack"


class NotLeft(MelldError):
    """The file cannot be written."""


class Legacy(msgspec.Struct, frozen=True):
    """The content of the file."""

    responses: list[LeftResponse] = []
    stories: dict[str, list[Story]] = {}
    """By model."""


def leave(directory: Path, legacy: Legacy) -> None:
    """Write the file, replacing an earlier unread one.

    Raises:
        NotLeft: it cannot be written; an earlier one stays.
    """
    path = directory / FILE
    text = msgspec.msgpack.encode(legacy, enc_hook=lambda one: one.model_dump(mode="json", exclude_none=True))  # vLLM's
    try:
        number, name = tempfile.mkstemp(prefix=f".{FILE}.", dir=directory)  # as another may write at the same time
        half = Path(name)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(text)
                os.fsync(file.fileno())
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)
    except OSError as error:
        raise NotLeft(f"{path}: cannot save stored responses there: {error.strerror}") from error


def take(directory: Path) -> Legacy:
    """Read and remove the file; return an empty one if it is missing, not ours, or of another version."""
    path = directory / FILE
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            text = file.read() if os.fstat(file.fileno()).st_uid == os.getuid() else b""
        path.unlink(missing_ok=True)
        return msgspec.msgpack.decode(text, type=Legacy)
    except (OSError, msgspec.MsgspecError):
        return Legacy()
