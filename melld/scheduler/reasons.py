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
    ROOM = "room", "it was next in the queue and fits now"
    NO_ROOM = "no room", "no worker has room"
    TOO_LARGE = "too large", "no worker could ever hold it"
    QUEUE_FULL = "queue full", "the queue is full"
    WAITED_TOO_LONG = "waited too long", "it waited longer than `[server] queue_deadline_s` allows"
    TOO_LATE = "too late", "its first token would be late, and no other worker can be woken"
    OPERATOR = "operator", "an operator requested it"
    DRAIN = "drain", "its worker is being drained, to leave service or to use fewer workers"
    DRAINED = "drained", "an operator is taking the worker out of service"
    EMPTY = "empty", "the worker has no requests"
    SERVICE = "service", "the load needs another worker to meet the targets"
    OVERLOAD = "overload", "its worker would overflow"
    MAKE_ROOM = "make room", "another request needs the memory"
    PUSHED_ASIDE = "pushed aside", "an arriving request needs the memory"
    BALANCE = "balance", "its worker is much fuller than another"
    EVICT = "evict", "a larger request needs the memory"
    COMPLETE = "complete", "two partly filled workers are being merged"
    REFILL = "refill", "it fills a gap left by another request"
    CIRCLE = "circle", "moves waiting for each other need a detour"
    ROLE = "role", "its worker does prefill, and another decodes"
