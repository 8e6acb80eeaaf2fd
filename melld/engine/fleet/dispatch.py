"""Requests on their way to a ready worker: from the beginning, from their tokens, or once it is their turn for trial.

Owns the lines of those on probation.  Places nothing: it gives a request to the worker that it was placed on.

    give ──► AddRequest (a new one)  or  ResumeRequest (its snapshot)
      └── of those that were there when a worker died, one at a time: the next when the one before is acquitted
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from melld.engine.fleet.probation import Probation
from melld.engine.fleet.request import Live
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer
from melld.ids import RequestId, WorkerId

Send = Callable[[WorkerId, msgspec.Struct, Sequence[Buffer]], None]
"""Writes a message and its payload to a worker's wire."""


class Dispatch:
    """Gives the requests of `live`."""

    def __init__(self, live: Mapping[RequestId, Live], send: Send) -> None:
        self._live = live
        self._send = send
        self._probation = Probation()

    def give(self, live: Live, worker: WorkerId) -> None:
        """The worker shall compute it; a suspect only when it is its turn."""
        if not live.deaths or self._probation.give(live.request, worker):
            self._begin(live, worker)

    def taken(self, taken: wire.RequestTaken) -> None:
        """Its worker has it."""
        live = self._live.get(RequestId(taken.request))
        if live is not None and live.lease == taken.lease:
            live.taken = True

    def acquit(self, request: RequestId) -> None:
        """It is no suspect any more, or has gone: let the next one of its worker go on."""
        following = self._probation.leave(request)
        live = self._live.get(following) if following is not None else None
        if live is not None and live.worker is not None:
            self._begin(live, live.worker)

    def worker_lost(self, worker: WorkerId) -> frozenset[RequestId]:
        """Those that waited for their turn there: they have nothing to do with its death."""
        return self._probation.worker_lost(worker)

    def _begin(self, live: Live, worker: WorkerId) -> None:
        live.taken = live.lease == 0
        if live.is_new:
            self._send(worker, wire.AddRequest(request=live.request, lease=live.lease), [live.core_request])
        else:
            resume = wire.ResumeRequest(request=live.request, lease=live.lease)
            self._send(worker, resume, [live.snapshot().encode()])
