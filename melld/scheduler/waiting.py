"""The requests that wait for room: those that lost their worker first, then by priority, then first come.

Owns the order of waiting; never decides who fits.
"""

import heapq
from collections.abc import Iterator

from melld.ids import RequestId
from melld.scheduler.state import Request

Rank = tuple[bool, int, int]


class WaitingQueue:
    """A heap with removal by name: what was removed is dropped when it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, RequestId]] = []
        self._ranks: dict[RequestId, Rank] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._ranks

    def __iter__(self) -> Iterator[RequestId]:
        """The waiting in the order in which they will be served."""
        return iter(sorted(self._ranks, key=self._ranks.__getitem__))

    def add(self, request: Request, displaced: bool = False) -> None:
        """Let the request wait; one that lost its worker goes ahead of all that never had one."""
        rank = (not displaced, request.priority, request.sequence)
        self._ranks[request.id] = rank
        heapq.heappush(self._heap, (rank, request.id))

    def remove(self, request: RequestId) -> None:
        """The request waits no more."""
        del self._ranks[request]

    def pass_over(self, request: RequestId) -> None:
        """Leave the head out of `head` until it is restored; it still waits."""
        assert self._heap[0][1] == request, request
        heapq.heappop(self._heap)

    def restore(self, request: RequestId) -> None:
        """The end of `pass_over`."""
        heapq.heappush(self._heap, (self._ranks[request], request))

    def head(self) -> RequestId | None:
        """Who is served next."""
        while self._heap:
            rank, request = self._heap[0]
            if self._ranks.get(request) == rank:
                return request
            heapq.heappop(self._heap)
        return None
