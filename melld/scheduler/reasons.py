"""Reasons of the scheduler's decisions: a word or two for the decision log, a sentence for people.

A reason says what a decision is for; a command's `cause` names the event that it was decided on.
"""

import enum


class Reason(enum.StrEnum):
    """Reason of a decision; the values appear in the decision log and in `melld status`, `sentence` in `melld why`."""

    sentence: str

    def __new__(cls, value: str, sentence: str = "") -> "Reason":
        """Make a member of its value and its sentence."""
        reason = str.__new__(cls, value)
        reason._value_, reason.sentence = value, sentence
        return reason

    ARRIVAL = "arrival", "it has just arrived"
    ROOM = "room", "it was next in line and there is room"
    NO_ROOM = "no room", "no worker has room"
    TOO_LARGE = "too large", "no worker could ever hold it"
    QUEUE_FULL = "queue full", "too many requests wait"
    WAITED_TOO_LONG = "waited too long", "it waited longer than `[server] queue_deadline_s` allows"
    TOO_LATE = "too late", "its first token could no longer come in time, and no other worker can be woken"
    OPERATOR = "operator", "an operator asked for it"
    DRAIN = "drain", "its worker is being emptied, to leave service or to use fewer workers"
    DRAINED = "drained", "an operator takes the worker out of service"
    EMPTY = "empty", "the worker has no requests"
    SERVICE = "service", "the load needs another worker to keep its targets"
    OVERLOAD = "overload", "its worker would overflow"
    MAKE_ROOM = "make room", "another request needs the room"
    PUSHED_ASIDE = "pushed aside", "an arriving request needs the room"
    BALANCE = "balance", "its worker is much fuller than another"
    CLASS = "class", "it has grown into another size class"
    EVICT = "evict", "a larger request needs the room"
    COMPLETE = "complete", "two part-filled workers are packed together"
    REFILL = "refill", "it fills a gap that another request left"
    LARGE_LEFT = "large left", "the large request beside it has ended"
    STRANDED = "stranded", "its worker is left with small requests only"
    CIRCLE = "circle", "moves that wait for each other need a detour"
    ROLE = "role", "its worker computes prompts, and another decodes"
