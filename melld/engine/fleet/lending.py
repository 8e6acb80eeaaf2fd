"""Grants granules of arenas to workers and takes them back, and says when those of an ended worker are free.

Owns each worker's unanswered take, and the siblings that may still copy from a worker that has ended.

    take ──TakeGranules──► worker ──GranulesReturned──► the owner, even too late
    worker ends ──CloseLink──► siblings ──LinkClosed──► the owner: nobody reads its memory any longer
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from melld.engine.fleet.owner import Owner
from melld.engine.wire import messages as wire
from melld.ids import NO_EVENT, EventId, WorkerId

log = logging.getLogger("melld.landlord")
ANSWER_S = 1.0
"""Time beyond a take's deadline for the step that runs when it comes, and for the answer."""


class Lending:
    """The lending of one fleet.  `send` writes to a worker's wire; `owner` returns who lends."""

    def __init__(self, send: Callable[[WorkerId, msgspec.Struct], None], owner: Callable[[], Owner]) -> None:
        self._send = send
        self._owner = owner
        self._takes: dict[WorkerId, int] = {}
        """The number of each worker's last take, until it is answered."""
        self._number = 0
        self._reading: dict[WorkerId, set[WorkerId]] = {}
        """The siblings that may still copy from a worker that has ended."""

    def grant(self, worker: WorkerId, granules: Iterable[int], cause: EventId = NO_EVENT) -> None:
        """Grant the worker these granules, which are free and zero."""
        self._send(worker, wire.GrantGranules(tuple(granules), cause))

    def take(self, worker: WorkerId, granules: int, deadline_s: float, cause: EventId = NO_EVENT) -> None:
        """Take granules from the worker: the owner hears what it returns, which is none if it does not answer."""
        self._number += 1
        self._takes[worker] = self._number
        self._send(worker, wire.TakeGranules(self._number, granules, deadline_s, cause))
        late_s = deadline_s + ANSWER_S
        asyncio.get_running_loop().call_later(late_s, self._fail, worker, self._number, f"no reply for {late_s:g} s")

    def returned(self, worker: WorkerId, returned: wire.GranulesReturned) -> None:
        """Pass a worker's answer on, late or not."""
        if self._takes.get(worker) == returned.take:
            del self._takes[worker]
        self._owner().returned(worker, returned)

    def _fail(self, worker: WorkerId, number: int, why: str) -> None:
        """Answer for a worker that has not: what it has stays granted."""
        if self._takes.get(worker) == number:
            log.info("%s did not give back KV memory: %s", worker, why)
            self.returned(worker, wire.GranulesReturned(take=number, granules=()))

    def worker_ended(self, worker: WorkerId, siblings: Iterable[WorkerId]) -> None:
        """Fail the take from an exited worker; its siblings have been told to close their links to it."""
        self._fail(worker, self._takes.get(worker, 0), "it exited before it replied")
        for readers in self._reading.values():
            readers.discard(worker)
        self._reading.setdefault(worker, set(siblings))  # it is there if it dozed, and has died since
        self._tell_gone()

    def link_closed(self, worker: WorkerId, peer: WorkerId) -> None:
        """Note that the worker no longer reads the memory of a sibling that has ended."""
        self._reading.get(peer, set()).discard(worker)
        self._tell_gone()

    def _tell_gone(self) -> None:
        gone = [worker for worker, readers in self._reading.items() if not readers]
        self._reading = {worker: readers for worker, readers in self._reading.items() if readers}
        for worker in gone:
            self._owner().worker_gone(worker)
