"""The queue of requests that wait for room.

    those that lost their worker     by priority, then first come: their clients have seen tokens
    then by priority                 lower first, as in vLLM
    then by client                   least served first (`share.FairShare`)
    then first come                  within one client

Owns the order and the share of each client; never decides which request fits or may wait.
"""

import bisect
from collections import Counter, OrderedDict
from collections.abc import Iterator

from melld.ids import RequestId
from melld.scheduler.share import FairShare
from melld.scheduler.state import Request

Line = OrderedDict[RequestId, Request]


class WaitingQueue:
    """Lines of requests, one per priority and client, and one of those that lost their worker."""

    def __init__(self) -> None:
        self.share = FairShare()
        self._displaced: list[tuple[int, int, RequestId]] = []  # priority, sequence: sorted
        self._lines: dict[int, dict[str, Line]] = {}  # by priority, then by client; none is empty
        self.requests: dict[RequestId, Request] = {}  # all that wait; read-only for others
        self._clients: Counter[str] = Counter()
        self._passed: list[tuple[Request, bool]] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: RequestId) -> bool:
        return request in self.requests

    def __iter__(self) -> Iterator[Request]:
        """Yield the waiting requests that have not begun, in no particular order."""
        return (request for lines in self._lines.values() for line in lines.values() for request in line.values())

    @property
    def newcomers(self) -> int:
        """Return the number of waiting requests that never had a worker."""
        return len(self.requests) - len(self._displaced)

    def add(self, request: Request, displaced: bool = False) -> None:
        """Queue the request; one that lost its worker goes ahead of all that never had one.

        Call for requests that never had a worker in the order of their sequence.
        """
        self.requests[request.id] = request
        if displaced:
            bisect.insort(self._displaced, (request.priority, request.sequence, request.id))
            return
        self._returns(request.client)
        self._clients[request.client] += 1
        self._line(request)[request.id] = request

    def remove(self, request: RequestId) -> bool:
        """Remove the request; return True if it had lost its worker."""
        found = self.requests.pop(request)
        entry = (found.priority, found.sequence, request)
        place = bisect.bisect_left(self._displaced, entry)
        if self._displaced[place : place + 1] == [entry]:
            del self._displaced[place]
            return True
        self._clients[found.client] -= 1
        if not self._clients[found.client]:
            del self._clients[found.client]
        self._leave_line(found)
        return False

    def begin(self, request: Request) -> None:
        """Count the request as served and remove it if it waited; a recomputed request is not charged again."""
        if not self.requests:
            self.share.begin_alone(request.client, request.kv_bytes)
            return
        if request.id not in self.requests:
            self._returns(request.client)
        elif self.remove(request.id):
            return
        self.share.begin(request.client, request.kv_bytes)

    def head(self) -> RequestId | None:
        """Return the request that is served next."""
        if self._displaced:
            return self._displaced[0][2]
        if not self._lines:
            return None
        lines = self._lines[min(self._lines)]
        if len(lines) == 1:
            return next(iter(next(iter(lines.values()))))
        first = [next(iter(line.values())) for line in lines.values()]
        return min(first, key=lambda request: (self.share.served_bytes(request.client), request.sequence)).id

    def last(self) -> Request:
        """Return the request to shed: among the least urgent, the newest of the client with the most of them.

        Between clients with equally many, the newest.
        """
        lines = self._lines[max(self._lines)].values()
        longest = max(lines, key=lambda line: (len(line), next(reversed(line.values())).sequence))
        return next(reversed(longest.values()))

    def would_be_last(self, client: str, priority: int) -> bool:
        """Return True if a request of the client, once queued, would be the one that `last` returns."""
        if not self._lines:
            return True
        least_urgent = max(self._lines)
        if priority != least_urgent:
            return priority > least_urgent
        lines = self._lines[priority]
        return len(lines.get(client, ())) + 1 >= max(map(len, lines.values()))

    def pass_over(self, request: RequestId) -> None:
        """Skip the head in `head` and `last` until `restore`; it still waits."""
        assert self.head() == request, request
        displaced = bool(self._displaced)
        self._passed.append((self.requests[request], displaced))
        if displaced:
            del self._displaced[0]
        else:
            self._leave_line(self.requests[request])

    def restore(self) -> None:
        """Put all requests that were passed over back in their places."""
        while self._passed:
            request, displaced = self._passed.pop()
            if displaced:
                bisect.insort(self._displaced, (request.priority, request.sequence, request.id))
            else:
                self._line(request)[request.id] = request
                self._line(request).move_to_end(request.id, last=False)

    def _returns(self, client: str) -> None:
        if client not in self._clients:
            self.share.returns(client, self._clients)

    def _line(self, request: Request) -> Line:
        return self._lines.setdefault(request.priority, {}).setdefault(request.client, OrderedDict())

    def _leave_line(self, request: Request) -> None:
        lines = self._lines[request.priority]
        line = lines[request.client]
        del line[request.id]
        if not line:
            del lines[request.client]
            if not lines:
                del self._lines[request.priority]
