"""Which of the requests that were there when a worker died may have killed it: found out one at a time.

Owns the suspects.  A worker dies and takes ten requests with it; one of them may be the cause, and the other nine must
not die of it twice.  So of those that are given to a worker, one at a time goes on there; when it has made a few tokens
it is acquitted and the next one follows.  If the worker dies too, the one that was on trial has killed two.

    given ──► waits in line ──► on trial ──► made PROOF_TOKENS, ended, left ──► the next one
"""

import collections

from melld.ids import RequestId, WorkerId

PROOF_TOKENS = 4


class Probation:
    """The lines of suspects, one for each worker."""

    def __init__(self) -> None:
        self._lines: dict[WorkerId, collections.deque[RequestId]] = {}
        self._worker_of: dict[RequestId, WorkerId] = {}

    def give(self, request: RequestId, worker: WorkerId) -> bool:
        """A suspect is placed on the worker.  True if it may go on at once, False if `leave` will name it."""
        line = self._lines.setdefault(worker, collections.deque())
        line.append(request)
        self._worker_of[request] = worker
        return len(line) == 1

    def waits(self, request: RequestId) -> bool:
        """Whether it has not gone on yet."""
        worker = self._worker_of.get(request)
        return worker is not None and self._lines[worker][0] != request

    def leave(self, request: RequestId) -> RequestId | None:
        """It is acquitted, has ended, or is elsewhere.  Returns who may go on in its place."""
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
        """The worker is gone, and its line with it.  Returns those that had not gone on there: they are innocent."""
        line = self._lines.pop(worker, collections.deque())
        for request in line:
            del self._worker_of[request]
        return frozenset(list(line)[1:])
