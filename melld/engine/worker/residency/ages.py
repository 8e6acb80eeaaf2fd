"""Requests that have waited on a worker for too long: from then on they go before all others there, first come first.

vLLM's line goes by priority alone, so a request that it has preempted, or not begun, would wait for as long as more
urgent ones come.  Owns since when each waits; counts anew once it has run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

FIRST = -1_000
"""More urgent than any client may be."""
LOOK_S = 1.0


class Ages:
    """The requests that wait on one engine; each may do so for `age_s`."""

    def __init__(self, scheduler: "Scheduler", age_s: float, clock: Callable[[], float]) -> None:
        self._scheduler: Any = scheduler
        self._age_s = age_s
        self._clock = clock
        self._since_s: dict[str, float] = {}
        self._next_look_s = 0.0

    def look(self) -> None:
        """Put those first that have waited for too long; call it before each step."""
        line, now_s = self._scheduler.waiting, self._clock()
        if now_s < self._next_look_s or not (line or self._since_s):
            return
        self._next_look_s = now_s + LOOK_S
        before, self._since_s = self._since_s, {}
        for request in list(line):
            since_s = self._since_s[request.request_id] = before.get(request.request_id, now_s)
            if now_s - since_s >= self._age_s and request.priority != FIRST:
                line.remove_request(request)
                request.priority = FIRST
                line.add_request(request)
