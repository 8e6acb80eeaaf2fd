"""Tracks what a worker has accepted: when its prompts are done, how busy they keep it, and how they delay its requests.

Owns one record per active worker.  Never decides where requests go.
"""

import math
from collections.abc import Iterator

from melld.ids import RequestId, WorkerId
from melld.scheduler.state import Worker

MEMORY_S = 10.0
"""Accepted prompts fade with this time constant."""


class WorkerLoad:
    """A worker's accepted prompts.  `free_s`: when they are done; at first, when the worker computes.

    `urgent_free_s`: when those of urgent requests are done, which go first.
    """

    __slots__ = ("_accepted_s", "_at_s", "_marks", "_prefilling", "free_s", "urgent_free_s")

    def __init__(self, ready_s: float) -> None:
        self.free_s = self.urgent_free_s = ready_s
        self._prefilling = 0.0
        self._at_s = ready_s
        self._accepted_s = 0.0  # of all prompts since the activation
        self._marks: dict[RequestId, tuple[float, float]] = {}  # accepted when it came; when its first token comes

    def backlog_s(self, now_s: float, urgent: bool = False) -> float:
        """Return how long the accepted prompts still take, or the worker to wake; `urgent`: those that go first."""
        return max((self.urgent_free_s if urgent else self.free_s) - now_s, 0.0)

    def prefilling(self, now_s: float) -> float:
        """Return the seconds of prompts accepted per second, lately."""
        return self._prefilling * math.exp(min(self._at_s - now_s, 0.0) / MEMORY_S)

    def accept(self, request: RequestId, prefill_s: float, now_s: float, urgent: bool = False) -> None:
        """Note a request whose prompt takes so long; an `urgent` one goes before others."""
        self._prefilling = self.prefilling(now_s) + prefill_s / MEMORY_S
        self._at_s = max(now_s, self._at_s)
        self._accepted_s += prefill_s
        self.free_s = max(now_s, self.free_s) + prefill_s
        first_s = self.free_s
        if urgent:
            first_s = self.urgent_free_s = max(now_s, self.urgent_free_s) + prefill_s
        self._marks[request] = self._accepted_s, first_s

    def adopt(self, request: RequestId, delay_s: float, first_s: float) -> None:
        """Note a request that came by a move, delayed so long elsewhere."""
        self._marks[request] = self._accepted_s - delay_s, first_s

    def release(self, request: RequestId) -> tuple[float, float] | None:
        """Forget a request; return its delay and the time of its first token."""
        mark = self._marks.pop(request, None)
        return None if mark is None else (self._accepted_s - mark[0], mark[1])

    def first_s(self, request: RequestId) -> float:
        """Return when the request's first token comes; 0 for one that is not known here."""
        mark = self._marks.get(request)
        return 0.0 if mark is None else mark[1]

    def decodes(self, now_s: float) -> int:
        """Return how many of the requests have had their first token."""
        return sum(first_s <= now_s for _, first_s in self._marks.values())

    def delays(self, now_s: float) -> Iterator[tuple[float, float]]:
        """Yield, for each request, all accepted prompts since it came, and the seconds it has decoded beside them."""
        done_s = self._accepted_s - self.backlog_s(now_s)
        for mark_s, first_s in self._marks.values():  # runs most often of all
            beside_s = now_s - first_s - (done_s - mark_s if done_s > mark_s else 0.0)
            yield self._accepted_s - mark_s, max(beside_s, 0.0)


class Loads:
    """The records of the active workers."""

    def __init__(self) -> None:
        self._loads: dict[WorkerId, tuple[int, WorkerLoad]] = {}

    def of(self, worker: Worker, now_s: float) -> WorkerLoad:
        """Return the worker's record, anew after each activation."""
        order, load = self._loads.get(worker.id, (None, None))
        if load is None or order != worker.order:
            load = WorkerLoad(now_s + worker.wake_s)
            self._loads[worker.id] = worker.order, load
        return load
