"""The queue as the daemon reports it: how long requests wait, how many were sent away, when clients may retry.

Owns the waiting times and the counts for the metrics.  Never decides who waits: the scheduler does.
"""

import logging
from collections import Counter
from collections.abc import Callable

from melld.engine.fleet.fleet import Fleet
from melld.errors import MelldError, QueueFull, WaitedTooLong
from melld.ids import RequestId
from melld.scheduler import events
from melld.scheduler.reasons import Reason

log = logging.getLogger("melld.driver")
MAX_RETRY_AFTER_S = 60.0
TELL_EVERY_S = 10.0


class RequestQueue:
    """The requests that wait for room, seen from the driver."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.sent_away: Counter[str] = Counter({Reason.QUEUE_FULL: 0, Reason.WAITED_TOO_LONG: 0, Reason.TOO_LATE: 0})
        """Requests sent away, by reason."""
        self._fleet = fleet
        self._clock = clock
        self._since_s: dict[RequestId, float] = {}
        self._last_wait_s = 0.0
        self._untold = 0
        self._told_s = float("-inf")

    def queued(self, request: RequestId) -> None:
        """Note that the request waits for room."""
        self._since_s[request] = self._clock()

    def placed(self, request: RequestId) -> None:
        """Note that the request was placed."""
        since_s = self._since_s.pop(request, None)
        self._last_wait_s = 0.0 if since_s is None else self._clock() - since_s

    def heard(self, event: events.AnyEvent) -> None:
        """Drop a finished request from the queue."""
        if isinstance(event, events.RequestFinished):
            self._since_s.pop(event.request, None)

    def refuse(self) -> None:
        """Refuse a request that would be sent away on arrival, before any work is done for it.

        Raises:
            QueueFull
        """
        self.sent_away[Reason.QUEUE_FULL] += 1
        self._tell(Reason.QUEUE_FULL)
        raise self._error(Reason.QUEUE_FULL)

    def send_away(self, command: events.ShedRequest) -> None:
        """Reject a waiting request, telling the client when to retry."""
        self._since_s.pop(command.request, None)
        self.sent_away[command.reason] += 1
        self._fleet.requests.end(command.request, self._error(command.reason))
        self._tell(command.reason)

    @property
    def retry_after_s(self) -> float:
        """Return how long the last placed request waited: an estimate for the next."""
        return min(MAX_RETRY_AFTER_S, max(1.0, self._last_wait_s))

    def _error(self, reason: Reason) -> MelldError:
        kind = QueueFull if reason is Reason.QUEUE_FULL else WaitedTooLong
        return kind(len(self._since_s), self.retry_after_s)

    def _tell(self, reason: Reason) -> None:
        """Log one line for many requests: under overload hundreds are shed."""
        self._untold += 1
        now_s = self._clock()
        if now_s - self._told_s >= TELL_EVERY_S:
            log.warning("rejected %d requests; last reason: %s", self._untold, reason)
            self._untold, self._told_s = 0, now_s
