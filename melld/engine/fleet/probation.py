"""Requests that were there when a worker died resume one at a time, the next when the one before is acquitted.

Owns the queues of these suspects.  Decides no placement.
"""

import collections

from melld.ids import RequestId, WorkerId


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
