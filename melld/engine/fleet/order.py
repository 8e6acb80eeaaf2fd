"""Whether a worker's report is the next one: each is taken once, and none is missed.

Owns one number per worker.  The wire keeps its order, so that anything else is a fault: a report that was there before
is dropped, and after one that is missing the worker's word is worth nothing (tokens may have been in it).
"""

import enum

import msgspec


class Turn(enum.StrEnum):
    """What to make of a report."""

    NEXT = "next"
    STALE = "stale"  # it came twice, or too late
    GAP = "gap"  # one before it never came


class ReportOrder(msgspec.Struct):
    """The reports (`wire.StepDone`) of one worker process, numbered from 1."""

    taken: int = 0

    def turn(self, number: int) -> Turn:
        """Whose turn it is; the next one is taken with that."""
        if number <= self.taken:
            return Turn.STALE
        if number > self.taken + 1:
            return Turn.GAP
        self.taken = number
        return Turn.NEXT
