"""Sends placed requests to their ready worker: from the beginning, from their tokens, or when their probation allows.

Owns the queues of suspects.  Decides no placement.

    give ──► AddRequest (a new one)  or  ResumeRequest (its tokens)
      └── requests that were there when a worker died: one at a time, the next when the one before is acquitted
"""

import collections
from collections.abc import Callable, Mapping, Sequence

import msgspec

from melld.engine.fleet.request import Live
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer
from melld.ids import RequestId, WorkerId

Send = Callable[[WorkerId, msgspec.Struct, Sequence[Buffer]], None]
"""Writes a message and its payload to a worker's wire."""


class Probation:
    """The queues of suspects, one for each worker.

    When a worker dies under ten requests, one of them may be the cause, and the other nine must not suffer twice.  So
    one suspect at a time resumes; once it has made `PROOF_TOKENS` it is acquitted and the next one follows.  If the
    worker dies again, only the suspect that was running bears a second death.
    """

    def __init__(self) -> None:
        self._lines: dict[WorkerId, collections.deque[RequestId]] = {}
        self._worker_of: dict[RequestId, WorkerId] = {}

    def give(self, request: RequestId, worker: WorkerId) -> bool:
        """Queue a suspect on the worker; return True if it may resume at once, False if `leave` will name it."""
        line = self._lines.setdefault(worker, collections.deque())
        line.append(request)
        self._worker_of[request] = worker
        return len(line) == 1

    def leave(self, request: RequestId) -> RequestId | None:
        """Drop a request that is acquitted, has ended or has left; return the one that may resume in its place."""
        worker = self._worker_of.pop(request, None)
        if worker is None:
            return None
        line = self._lines[worker]
        was_on_trial = line[0] == request
        line.remove(request)
        if not line:
            del self._lines[worker]
            return None
        return line[0] if was_on_trial else None

    def worker_lost(self, worker: WorkerId) -> frozenset[RequestId]:
        """Drop a dead worker's queue; return the suspects that had not resumed there: they are innocent."""
        line = self._lines.pop(worker, collections.deque())
        for request in line:
            del self._worker_of[request]
        return frozenset(list(line)[1:])


class Delivery:
    """Sends the requests of `live` to their workers."""

    def __init__(self, live: Mapping[RequestId, Live], send: Send) -> None:
        self._live = live
        self._send = send
        self._probation = Probation()

    def give(self, live: Live, worker: WorkerId) -> None:
        """Start or resume the request on the worker; a suspect waits for its turn."""
        if not live.deaths or self._probation.give(live.request, worker):
            self._begin(live, worker)

    def taken(self, taken: wire.RequestTaken) -> None:
        """Note that the worker has received the request."""
        live = self._live.get(RequestId(taken.request))
        if live is not None and live.lease == taken.lease:
            live.taken = True

    def acquit(self, request: RequestId) -> None:
        """Drop the request from its queue of suspects, if it is in one, and resume the next one."""
        following = self._probation.leave(request)
        live = self._live.get(following) if following is not None else None
        if live is not None and live.worker is not None:
            self._begin(live, live.worker)

    def worker_lost(self, worker: WorkerId) -> frozenset[RequestId]:
        """Return the suspects that waited on the worker: its death is not their doing."""
        return self._probation.worker_lost(worker)

    def _begin(self, live: Live, worker: WorkerId) -> None:
        live.taken = live.lease == 0
        if live.is_new:
            add = wire.AddRequest(request=live.request, lease=live.lease, cause=live.cause)
            self._send(worker, add, [live.core_request])
        else:
            resume = wire.ResumeRequest(request=live.request, lease=live.lease, cause=live.cause)
            self._send(worker, resume, [live.core_request, msgspec.msgpack.encode(live.output_token_ids)])
