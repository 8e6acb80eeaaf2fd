"""An event of a stream with a place for its text, cut from one that vLLM made, and the text in what a parser says.

Pure.
"""

from typing import Any, NamedTuple, Protocol

import msgspec

_encode = msgspec.json.Encoder().encode  # a text as pydantic has it, in less than half the time
_NUMBER = '"sequence_number":'


class Sink(Protocol):
    """A client's connection, as far as events of its stream go there."""

    @property
    def is_paused(self) -> bool:
        """Return True if the client reads too slowly."""

    def send(self, event: bytes) -> bool:
        """Write an event at once; return False, with nothing written, if it is paused or closing."""


Kind = tuple[str, frozenset[str], int] | None
"""The field of a parser's message that has text, all that it sets, and in how many places the text is told; None where
no parser is."""


class Mould(NamedTuple):
    """An event without its text, and without its number if it has one."""

    parts: tuple[bytes, ...]
    """What stands around the places of its text."""
    behind_number: bytes | None

    def cast(self, text: str, number: int) -> bytes:
        """Return the event with this text, in the encoding of vLLM's models."""
        event = _encode(text).join(self.parts)
        return event if self.behind_number is None else b"%b%d%b" % (event, number, self.behind_number)


def mould_of(event: str, text: str, number: int | None, kind: Kind = None) -> Mould | None:
    """Return an event's mould; None if its text is in other than the places of its kind."""
    parts, behind = event.split(_encode(text).decode()), None
    if len(parts) != (1 if kind is None else kind[2]) + 1:
        return None
    if number is not None:
        after, found, behind = parts[-1].partition(f"{_NUMBER}{number}")
        if not found:
            return None
        parts[-1] = after + _NUMBER
    return Mould(tuple(part.encode() for part in parts), None if behind is None else behind.encode())


CONTENT: Kind = "content", frozenset(("content",)), 1
"""The kind of a text that a parser has left as it is."""


def plain_part(message: Any) -> tuple[Kind, str] | None:
    """Return the one text of a parser's `DeltaMessage`; None if it says more, or nothing."""
    if message is None or message.tool_calls or (message.content is None) == (message.reasoning is None):
        return None
    field = "content" if message.reasoning is None else "reasoning"
    return (field, frozenset(message.model_fields_set), 1 + len(message.model_extra or ())), getattr(message, field)
