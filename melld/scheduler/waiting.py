"""The queue of requests that wait for room.

    by class and age                 each `age_s` of waiting lifts a priority by a class (`priorities`)
    those that lost their worker     first come: their clients have seen tokens
    then by priority                 lower first, as in vLLM
    then by client                   least served first (`FairShare`)
    then first come                  within one client

Requests of one priority age together, as the oldest of them has: age turns no order round among equals, least of all
that of clients, and with one priority it changes nothing.  So nobody starves: a request is passed only by priorities of
which somebody has waited as long, less `age_s` for each class between them and one more.

Owns the order and the share of each client; never decides which request fits or may wait.
"""

import bisect
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from melld.ids import RequestId
from melld.scheduler.priorities import Priorities
from melld.scheduler.state import Request

Line = OrderedDict[RequestId, Request]


class FairShare:
    """The service of each client: the KV bytes of all its requests so far, prompts and growth.

    Source: the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), with KV
    bytes instead of tokens.  Absence earns no credit: a returning client's number is lifted to that of the client
    served last.  A client is a short name, empty without keys; there are as many as keys.
    """

    def __init__(self) -> None:
        self._served_bytes: dict[str, int] = {}
        self._floor_bytes = 0
        """Service of the client served last, before that: a newcomer begins here, and so goes first."""

    def served_bytes(self, client: str) -> int:
        """Return the client's service so far, in KV bytes."""
        return self._served_bytes.get(client, 0)

    def returns(self, client: str, waiting: Iterable[str]) -> None:
        """Raise the service count of a client that starts to wait; `waiting`: the clients that already wait."""
        least_bytes = min((self._floor_bytes, *map(self.served_bytes, waiting)))
        self._served_bytes[client] = max(self.served_bytes(client), least_bytes)

    def begin(self, client: str, kv_bytes: int) -> None:
        """Count the prompt of a client's request that is now served."""
        had_bytes = self.served_bytes(client)
        self._floor_bytes = max(self._floor_bytes, had_bytes)
        self._served_bytes[client] = had_bytes + kv_bytes

    def grow(self, client: str, kv_bytes: int) -> None:
        """Count the growth of a client's request."""
        self._served_bytes[client] = self.served_bytes(client) + kv_bytes


class Equals:
    """Waiting requests of one priority: displaced ones, and a queue for each client."""

    def __init__(self) -> None:
        self.displaced: list[Request] = []  # by sequence
        self.lines: dict[str, Line] = {}  # none is empty

    def __bool__(self) -> bool:
        return bool(self.displaced or self.lines)

    def firsts(self) -> list[Request]:
        """Return the first request of each client."""
        return [next(iter(line.values())) for line in self.lines.values()]


class WaitingQueue:
    """All waiting requests of one model."""

    def __init__(self, priorities: Priorities | None = None) -> None:
        self.share = FairShare()
        self._level = (priorities or Priorities()).level
        self._equals: dict[int, Equals] = {}  # by priority; none is empty
        self.requests: dict[RequestId, Request] = {}  # all that wait; read-only for others
        self.newcomers = 0
        """How many of them never had a worker."""
        self._clients: Counter[str] = Counter()
        self._passed: list[tuple[Request, bool]] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: RequestId) -> bool:
        return request in self.requests

    def __iter__(self) -> Iterator[Request]:
        """Yield the waiting requests that have not begun, in no particular order."""
        for equals in self._equals.values():
            for line in equals.lines.values():
                yield from line.values()

    def add(self, request: Request, displaced: bool = False) -> None:
        """Queue the request; one that lost its worker goes ahead of others of its priority.

        Call for requests that never had a worker in the order of their sequence.
        """
        self.requests[request.id] = request
        if not displaced:
            self._returns(request.client)
            self._clients[request.client] += 1
            self.newcomers += 1
        self._enter(request, displaced)

    def remove(self, request: RequestId) -> bool:
        """Remove the request; return True if it had lost its worker."""
        found = self.requests.pop(request)
        if self._leave(found):
            return True
        self.newcomers -= 1
        self._clients[found.client] -= 1
        if not self._clients[found.client]:
            del self._clients[found.client]
        return False

    def begin(self, request: Request) -> None:
        """Count the request as served and remove it if it waited; a recomputed request is not charged again."""
        if request.id not in self.requests:
            self._returns(request.client)
        elif self.remove(request.id):
            return
        self.share.begin(request.client, request.kv_bytes)

    def head(self, now_s: float) -> RequestId | None:
        """Return the request that is served next."""
        if not self._equals:
            return None
        equals = self._equals[min(self._equals, key=lambda priority: self._urgency(priority, now_s))]
        if equals.displaced:
            return equals.displaced[0].id
        firsts = equals.firsts()
        if len(firsts) == 1:
            return firsts[0].id
        return min(firsts, key=lambda request: (self.share.served_bytes(request.client), request.sequence)).id

    def goes_first(self, request: Request) -> bool:
        """Return True if no request of its priority that lost its worker goes before this waiting one."""
        displaced = self._equals[request.priority].displaced
        return not displaced or displaced[0] is request

    def last(self, now_s: float) -> Request:
        """Return the request to shed: among the least urgent, the newest of the client with the most of them."""
        return _newest(max(self._lines(), key=lambda line: self._order_to_shed(line, now_s)))

    def would_be_last(self, client: str, priority: int, now_s: float) -> bool:
        """Return True if a request of the client, once queued, would be the one that `last` returns."""
        its_line = self._equals[priority].lines.get(client, ()) if priority in self._equals else ()
        its_order = self._level(priority, 0.0), priority, len(its_line) + 1
        return all(self._order_to_shed(line, now_s)[:3] <= its_order for line in self._lines())

    def _lines(self) -> Iterable[Line]:
        return (line for equals in self._equals.values() for line in equals.lines.values())

    def _order_to_shed(self, line: Line, now_s: float) -> tuple[int, int, int, int]:
        newest = _newest(line)
        level = self._level(newest.priority, now_s - newest.waits_since_s)
        return level, newest.priority, len(line), newest.sequence

    def pass_over(self, request: RequestId) -> None:
        """Skip the head in `head` and `last` until `restore`; it still waits."""
        found = self.requests[request]
        self._passed.append((found, self._leave(found)))

    def restore(self) -> None:
        """Put all requests that were passed over back in their places."""
        while self._passed:
            request, displaced = self._passed.pop()
            self._enter(request, displaced)
            if not displaced:
                self._equals[request.priority].lines[request.client].move_to_end(request.id, last=False)

    def _urgency(self, priority: int, now_s: float) -> tuple[int, bool, int]:
        """Return the sort key of priorities, the most urgent first."""
        if len(self._equals) == 1:
            return 0, False, 0
        equals = self._equals[priority]
        oldest_s = min(request.waits_since_s for request in (*equals.displaced, *equals.firsts()))
        return self._level(priority, now_s - oldest_s), not equals.displaced, priority

    def _returns(self, client: str) -> None:
        if client not in self._clients:
            self.share.returns(client, self._clients)

    def _enter(self, request: Request, displaced: bool) -> None:
        equals = self._equals.setdefault(request.priority, Equals())
        if displaced:
            bisect.insort(equals.displaced, request, key=lambda one: one.sequence)
        else:
            equals.lines.setdefault(request.client, OrderedDict())[request.id] = request

    def _leave(self, request: Request) -> bool:
        """Remove the request from its place; return True if it had lost its worker."""
        equals = self._equals[request.priority]
        line = equals.lines.get(request.client)
        displaced = line is None or request.id not in line
        if line is None or displaced:
            equals.displaced.remove(request)
        else:
            del line[request.id]
            if not line:
                del equals.lines[request.client]
        if not equals:
            del self._equals[request.priority]
        return displaced


def _newest(line: Line) -> Request:
    return next(reversed(line.values()))
