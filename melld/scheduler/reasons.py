"""Reasons of the scheduler's decisions: a word or two for the decision log, a sentence for people.

A reason says what a decision is for; a command's `cause` names the event that it was decided on.
"""

import enum
from collections.abc import Mapping


class Reason(enum.StrEnum):
    """Reason of a decision; the values appear in the decision log and in `melld status`."""

    ARRIVAL = "arrival"
    ROOM = "room"
    NO_ROOM = "no room"
    TOO_LARGE = "too large"
    QUEUE_FULL = "queue full"
    WAITED_TOO_LONG = "waited too long"
    TOO_LATE = "too late"
    OPERATOR = "operator"
    DRAIN = "drain"
    DRAINED = "drained"
    EMPTY = "empty"
    SERVICE = "service"
    OVERLOAD = "overload"
    MAKE_ROOM = "make room"
    PUSHED_ASIDE = "pushed aside"
    BALANCE = "balance"
    CLASS = "class"
    EVICT = "evict"
    COMPLETE = "complete"
    REFILL = "refill"
    LARGE_LEFT = "large left"
    STRANDED = "stranded"
    CIRCLE = "circle"
    ROLE = "role"

    @property
    def sentence(self) -> str:
        """Return the reason in plain words."""
        return _SENTENCES[self]


_SENTENCES: Mapping[Reason, str] = {
    Reason.ARRIVAL: "it has just arrived",
    Reason.ROOM: "it was next in line and there is room",
    Reason.NO_ROOM: "no worker has room",
    Reason.TOO_LARGE: "no worker could ever hold it",
    Reason.QUEUE_FULL: "too many requests wait",
    Reason.WAITED_TOO_LONG: "it waited longer than `[server] queue_deadline_s` allows",
    Reason.TOO_LATE: "its first token could no longer come in time, and no other worker can be woken",
    Reason.OPERATOR: "an operator asked for it",
    Reason.DRAIN: "its worker is being emptied, to leave service or to use fewer workers",
    Reason.DRAINED: "an operator takes the worker out of service",
    Reason.EMPTY: "the worker has no requests",
    Reason.SERVICE: "the load needs another worker to keep its targets",
    Reason.OVERLOAD: "its worker would overflow",
    Reason.MAKE_ROOM: "another request needs the room",
    Reason.PUSHED_ASIDE: "an arriving request needs the room",
    Reason.BALANCE: "its worker is much fuller than another",
    Reason.CLASS: "it has grown into another size class",
    Reason.EVICT: "a larger request needs the room",
    Reason.COMPLETE: "two part-filled workers are packed together",
    Reason.REFILL: "it fills a gap that another request left",
    Reason.LARGE_LEFT: "the large request beside it has ended",
    Reason.STRANDED: "its worker is left with small requests only",
    Reason.ROLE: "its worker computes prompts, and another decodes",
    Reason.CIRCLE: "moves that wait for each other need a detour",
}
