"""Grants granules of arenas to workers and takes them back, and says when those of an ended worker are free.

Owns the siblings that may still copy from a worker that has ended.

    take ──TakeGranules──► worker ──GranulesReturned──► the owner, whether or not the caller has given up
    worker ends ──CloseLink──► siblings ──LinkClosed──► the owner: nobody reads its memory any longer
"""

from collections.abc import Callable, Iterable

import msgspec

from melld.engine.fleet.calls import Calls
from melld.engine.fleet.ports import WorkerOwner
from melld.engine.wire import messages as wire
from melld.errors import MelldError
from melld.ids import NO_EVENT, EventId, WorkerId

ANSWER_S = 1.0
"""Time beyond a take's deadline for the step that runs when it comes, and for the answer."""


class TakeFailed(MelldError):
    """The worker has not given back granules; what it has stays granted."""

    def __init__(self, worker: WorkerId, why: str) -> None:
        super().__init__(f"{worker} did not give back KV memory: {why}")


class Lending:
    """The lending of one fleet.  `send` writes to a worker's wire; `owner`: none while nothing is lent."""

    def __init__(self, send: Callable[[WorkerId, msgspec.Struct], None], owner: WorkerOwner | None = None) -> None:
        self._send = send
        self.owner = owner
        self._takes = Calls(send)
        self._reading: list[tuple[WorkerId, set[WorkerId]]] = []

    def grant(self, worker: WorkerId, granules: Iterable[int], cause: EventId = NO_EVENT) -> None:
        """Grant the worker these granules, which are free and zero."""
        self._send(worker, wire.GrantGranules(tuple(granules), cause))

    async def take(self, worker: WorkerId, granules: int, deadline_s: float, cause: EventId = NO_EVENT) -> None:
        """Take granules from the worker; return once it has replied and the owner knows what it gave back.

        Raises:
            TakeFailed: the worker has ended, or does not answer.
        """

        def make(number: int) -> wire.TakeGranules:
            return wire.TakeGranules(number, granules, deadline_s, cause)

        try:
            await self._takes.ask(worker, make, deadline_s + ANSWER_S)
        except TimeoutError as error:
            raise TakeFailed(worker, f"no reply for {deadline_s + ANSWER_S:g} s") from error
        except RuntimeError as error:
            raise TakeFailed(worker, str(error)) from error

    def returned(self, worker: WorkerId, returned: wire.GranulesReturned) -> None:
        """Pass a worker's answer on at once: when the caller runs again, the worker may have ended."""
        self._takes.answered(returned.take, None)
        if self.owner is not None:
            self.owner.returned(worker, returned)

    def worker_ended(self, worker: WorkerId, siblings: Iterable[WorkerId]) -> None:
        """Fail the takes from an exited worker; its siblings have been told to close their links to it."""
        self._takes.worker_lost(worker)
        for _, readers in self._reading:
            readers.discard(worker)
        if worker not in [ended for ended, _ in self._reading]:  # else it dozed, and has died since
            self._reading.append((worker, set(siblings)))
        self._tell_gone()

    def link_closed(self, worker: WorkerId, peer: WorkerId) -> None:
        """Note that the worker no longer reads the memory of a sibling that has ended."""
        for ended, readers in self._reading:
            if ended == peer and worker in readers:
                readers.remove(worker)
                break
        self._tell_gone()

    def _tell_gone(self) -> None:
        gone = [worker for worker, readers in self._reading if not readers]
        self._reading = [waiting for waiting in self._reading if waiting[1]]
        if self.owner is not None:
            for worker in gone:
                self.owner.worker_gone(worker)
