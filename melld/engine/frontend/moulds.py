"""A template for stream events, cut from one that vLLM made, and the text within a parser's message.

Pure.
"""

from typing import Any, NamedTuple, Protocol

import msgspec

_encode = msgspec.json.Encoder().encode  # encodes a text as pydantic does, in less than half the time
_NUMBER = '"sequence_number":'
_OWN = b"0123456789abcdefABCDEF-"  # most ids and times consist of these


class Sink(Protocol):
    """A client's connection, as seen by those who write events to it."""

    @property
    def is_paused(self) -> bool:
        """Return True if the client is reading too slowly."""

    def send(self, event: bytes) -> bool:
        """Write an event now; return False, having written nothing, if the connection is paused or closing."""


Kind = tuple[str, frozenset[str], int] | None
"""The text field of a parser's message, all fields that it sets, and how many hold the text; None without a parser."""


class Mould(NamedTuple):
    """An event without its text, and without its sequence number if it has one."""

    parts: tuple[bytes, ...]
    """The parts around the occurrences of its text."""
    behind_number: bytes | None

    def cast(self, text: str, number: int) -> bytes:
        """Return the event with this text, encoded as vLLM's models do."""
        event = _encode(text).join(self.parts)
        return event if self.behind_number is None else b"%b%d%b" % (event, number, self.behind_number)

    @property
    def common(self) -> bytes:
        """Return what it has in common with the moulds of other streams like its own."""
        return b"\0".join((*self.parts, self.behind_number or b"")).translate(None, _OWN)


class KnownMoulds:
    """What moulds have in common that two events of a stream have had, one after the other.

    The first event of another stream that fits one of them is enough: the next one will differ only in its text, too.
    """

    def __init__(self) -> None:
        self._common: set[tuple[bytes, Kind]] = set()

    def trusts(self, mould: Mould, kind: Kind, *, is_proved: bool) -> bool:
        """Return True if the stream's next event will be like this one; `is_proved`: its last two were alike."""
        common = mould.common, kind
        if is_proved:
            if len(self._common) >= MOST_KNOWN:
                self._common.clear()
            self._common.add(common)
        return common in self._common


MOST_KNOWN = 1000  # clients choose ids, and some look like none


def mould_of(event: str, text: str, number: int | None, kind: Kind = None) -> Mould | None:
    """Return the mould of an event; None if the text does not occur as often as in its kind."""
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
"""The kind of text that a parser passes on unchanged."""


def plain_part(message: Any) -> tuple[Kind, str] | None:
    """Return the only text of a parser's `DeltaMessage`; None if it holds more than that, or nothing."""
    if message is None or message.tool_calls or (message.content is None) == (message.reasoning is None):
        return None
    field = "content" if message.reasoning is None else "reasoning"
    return (field, frozenset(message.model_fields_set), 1 + len(message.model_extra or ())), getattr(message, field)
