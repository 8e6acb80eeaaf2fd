"""Tracks what a worker has accepted: when its prompts are done, how busy they keep it, and how they delay its requests.

Owns one record per active worker.  Never decides where requests go.
"""

import bisect
import math
from collections.abc import Iterator

from melld.ids import RequestId, WorkerId
from melld.scheduler.policies.slo import constants
from melld.scheduler.state import Worker

Turn = tuple[bool, float]
"""(False: urgent; when the first token is due): the worker computes the smallest first."""


class _Awaited:
    """A prompt that has not been computed yet: when it will be."""

    __slots__ = ("end_s", "request", "turn")

    def __init__(self, request: RequestId, turn: Turn, end_s: float) -> None:
        self.request = request
        self.turn = turn
        self.end_s = end_s


def _turn(awaited: _Awaited) -> Turn:
    return awaited.turn


class WorkerLoad:
    """A worker's accepted prompts.  `ready_s`: when the worker computes."""

    __slots__ = ("_accepted_s", "_at_s", "_free_s", "_line", "_marks", "_prefilling", "_ready_s")

    def __init__(self, ready_s: float) -> None:
        self._free_s = self._ready_s = ready_s
        self._line: list[_Awaited] = []  # by turn
        self._prefilling = 0.0
        self._at_s = ready_s
        self._accepted_s = 0.0  # of all prompts since the activation
        self._marks: dict[RequestId, tuple[float, float]] = {}  # accepted before its first token; when that comes

    def backlog_s(self, now_s: float) -> float:
        """Return how long the accepted prompts still take, or the worker to wake."""
        return max(self._free_s - now_s, 0.0)

    def ahead_s(self, turn: Turn, now_s: float) -> float:
        """Return how long those of them take that go before a prompt with this turn, or the worker to wake."""
        place = bisect.bisect_right(self._line, turn, key=_turn)
        return max((self._line[place - 1].end_s if place else self._ready_s) - now_s, 0.0)

    def made_late(self, turn: Turn, prefill_s: float, now_s: float) -> int:
        """Return how many first tokens would come too late if a prompt with this turn took so long before them."""
        after = self._line[bisect.bisect_right(self._line, turn, key=_turn) :]
        return sum(now_s < one.end_s <= one.turn[1] < one.end_s + prefill_s for one in after)

    def prefilling(self, now_s: float) -> float:
        """Return the seconds of prompts accepted per second, lately."""
        return self._prefilling * math.exp(min(self._at_s - now_s, 0.0) / constants.ACCEPTED_S)

    def accept(self, request: RequestId, prefill_s: float, now_s: float, turn: Turn, later_s: float) -> None:
        """Note a request whose prompt takes so long, and goes before those of later turns.

        `later_s`: by how much later its own turn is where it would be late.
        """
        self._prefilling = self.prefilling(now_s) + prefill_s / constants.ACCEPTED_S
        self._at_s = max(now_s, self._at_s)
        self._accepted_s += prefill_s
        self._free_s = max(now_s, self._free_s) + prefill_s
        self._line = [one for one in self._line if one.end_s > now_s]
        if now_s + self.ahead_s(turn, now_s) + prefill_s > turn[1]:
            turn = turn[0], turn[1] + later_s
        first_s = now_s + self.ahead_s(turn, now_s) + prefill_s
        place = bisect.bisect_right(self._line, turn, key=_turn)
        for one in self._line[place:]:
            one.end_s += prefill_s
            if (mark := self._marks.get(one.request)) is not None:
                self._marks[one.request] = mark[0] + prefill_s, mark[1] + prefill_s
        self._line.insert(place, _Awaited(request, turn, first_s))
        self._marks[request] = self._accepted_s - (self._free_s - first_s), first_s

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
