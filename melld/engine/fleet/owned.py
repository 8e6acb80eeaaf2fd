"""Reads the ledger of requests, by their owners alone.

Owns nothing: reads the fleet's requests and the ledger.  While a request moves, the ledger counts it on two workers,
and a worker's last report may come after the request has left; the scheduler hears of the owner's blocks only.
"""

from collections.abc import Mapping

from melld.engine.fleet.request import Live
from melld.ids import RequestId, WorkerId
from melld.kvstore.ledger import Ledger


class OwnedBlocks:
    """The blocks of the requests in `live` on the workers that own them."""

    def __init__(self, live: Mapping[RequestId, Live], ledger: Ledger) -> None:
        self._live = live
        self._ledger = ledger

    def owned(self, request: RequestId, worker: WorkerId) -> Live | None:
        """Return the request if the worker owns it."""
        live = self._live.get(request)
        return live if live is not None and live.worker == worker else None

    def take_grown(self) -> dict[RequestId, int]:
        """Return the sizes of the placed requests that have grown since the last call."""
        grown = self._ledger.take_grown()
        return {request: kv_bytes for (request, worker), kv_bytes in grown.items() if self.owned(request, worker)}

    def take_preempted(self) -> list[RequestId]:
        """Return the placed requests that vLLM has preempted since the last call."""
        return [request for request, worker in self._ledger.take_emptied() if self.owned(request, worker)]

    def shared_bytes(self, worker: WorkerId) -> int:
        """Return how many bytes sharing saves among the worker's requests, at least."""
        return self._ledger.shared_bytes(worker, lambda request: self.owned(request, worker) is not None)
