"""The users' requests on a worker: how they start or resume from their tokens, and how they are aborted.

Owns the requests that wait until what they have left behind here has ended: a copy of a cancelled migration, or a step
in flight.  For the engine thread, between two steps.
Requests that arrive by a migration are in `worker/migration.py`.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from melld.engine.wire import messages as wire
from melld.engine.worker.migration import Moves
from melld.engine.worker.migration_book import Book
from melld.engine.worker.residency.residency import Arrival, Residency
from melld.ids import EventId
from melld.migrate.snapshot import MoveRefused


class Admitted(msgspec.Struct, frozen=True):
    """A new request that the preparer has made ready for the scheduler (`vllm.v1.request.Request`)."""

    request: Any
    lease: int
    cause: EventId


class ReadyToResume(msgspec.Struct, frozen=True):
    """A request that the preparer has made ready to resume here from its tokens."""

    arrival: Arrival
    lease: int
    cause: EventId


class Requests:
    """The requests of one engine.  `say` sends a message to the daemon."""

    def __init__(
        self,
        residency: Residency,
        moves: Moves,
        book: Book,
        say: Callable[[Any], None],
    ) -> None:
        self._residency = residency
        self._moves = moves
        self._book = book
        self._say = say
        self._deferred: list[ReadyToResume] = []

    def admit(self, admitted: Admitted) -> None:
        """Start a new request."""
        request = admitted.request.request_id
        try:
            self._residency.admit(admitted.request)
        except MoveRefused as error:
            self._say(wire.RequestRejected(request=request, reason=error.reason.value, cause=admitted.cause))
        else:
            self._book.came(request, admitted.lease)

    def resume(self, resumed: ReadyToResume) -> None:
        """Resume a request from its tokens, now or as soon as possible."""
        request, residency = resumed.arrival.request_id, self._residency
        is_written = request in residency.written  # a cancelled migration to this worker: its blocks are not free yet
        has_left_some = request in self._book.leases or request in residency.expected or request in residency.frozen
        if has_left_some and not is_written:  # of a cancelled migration: it arrives in another way now
            self._moves.forget([request])
        if is_written or residency.is_in_flight(request):  # else that step's output would be taken for its new life's
            self._deferred.append(resumed)
            return
        try:
            residency.attach_unreserved(resumed.arrival)
        except MoveRefused as error:
            self._say(wire.RequestRejected(request=request, reason=str(error), cause=resumed.cause))
        else:
            self._book.came(request, resumed.lease)

    def resume_deferred(self) -> None:
        """Resume the requests that waited for a copy or a step that has ended; call it before each step."""
        deferred, self._deferred = self._deferred, []
        for resumed in deferred:
            self.resume(resumed)

    def abort(self, abort: wire.AbortRequests) -> None:
        """Abort the requests, whatever their state."""
        self._deferred = [resumed for resumed in self._deferred if resumed.arrival.request_id not in abort.requests]
        self._moves.forget(abort.requests)
