"""A worker's part in lending: it uses the granules that it is granted, and gives back as many as it is asked for.

Owns the takes that wait.  For the engine thread, between two steps; `residency` does the work.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from melld.engine.wire import messages as wire
from melld.engine.worker.residency.lent_blocks import Emptied, LentBlocks


class _Take(NamedTuple):
    """A take, and when it must be answered."""

    message: wire.TakeGranules
    due_s: float


class Borrower:
    """The granules of one worker.  `lent` is None without an arena; `say` sends a message to the daemon."""

    def __init__(self, lent: LentBlocks | None, say: Callable[[msgspec.Struct], None]) -> None:
        self._lent = lent
        self._say = say
        self._takes: list[_Take] = []

    def grant(self, granted: wire.GrantGranules) -> None:
        """Use these granules."""
        if self._lent is not None:
            self._lent.grant(granted.granules)

    def take(self, take: wire.TakeGranules) -> None:
        """Give back granules as soon as that is possible."""
        self._takes.append(_Take(take, time.monotonic() + take.deadline_s))

    def go_on(self, is_busy: bool) -> None:
        """Answer the takes that can be answered now.  Call it when no step is in flight.

        At its deadline, or when nothing runs that could end, a take gets what can be given, whoever must wait for it.
        """
        for take in list(self._takes):
            is_due = not is_busy or time.monotonic() >= take.due_s
            emptied = self._empty(take.message.granules, preempts=is_due)
            if emptied is not None:
                self._takes.remove(take)
                self._answer(take.message, emptied)

    def _empty(self, count: int, preempts: bool) -> Emptied | None:
        if self._lent is None:
            return Emptied()
        return self._lent.empty(count, preempts=preempts)

    def _answer(self, take: wire.TakeGranules, emptied: Emptied) -> None:
        returned = wire.GranulesReturned(
            take=take.take,
            granules=emptied.granules,
            moved_blocks=emptied.moved_blocks,
            cause=take.cause,
        )
        self._say(returned)
