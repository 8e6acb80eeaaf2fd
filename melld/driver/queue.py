"""Who waits for room, as the daemon tells of it: how long, who was sent away, and when to come again.

Owns the times of waiting and the counts for the metrics.  Never decides who waits: the scheduler does.
"""

import logging
from collections import Counter
from collections.abc import Callable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from melld.engine.fleet.fleet import Fleet
from melld.errors import MelldError, QueueFull, WaitedTooLong
from melld.ids import RequestId
from melld.scheduler import events
from melld.scheduler.reasons import Reason

log = logging.getLogger("melld.driver")
MAX_RETRY_AFTER_S = 60.0
TELL_EVERY_S = 10.0


class WaitingLine:
    """The line in front of the workers, seen from the driver."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.sent_away: Counter[str] = Counter({Reason.QUEUE_FULL: 0, Reason.WAITED_TOO_LONG: 0})
        """How many, by the reason."""
        self._fleet = fleet
        self._clock = clock
        self._since_s: dict[RequestId, float] = {}
        self._last_wait_s = 0.0
        self._untold = 0
        self._told_s = float("-inf")

    def waits(self, request: RequestId) -> None:
        """There is no room for it now."""
        self._since_s[request] = self._clock()

    def goes_on(self, request: RequestId) -> None:
        """It was given room."""
        since_s = self._since_s.pop(request, None)
        self._last_wait_s = 0.0 if since_s is None else self._clock() - since_s

    def heard(self, event: events.AnyEvent) -> None:
        """Who has ended waits no more."""
        if isinstance(event, events.RequestFinished):
            self._since_s.pop(event.request, None)

    def refuse(self) -> None:
        """Refuse one that would be sent away as soon as it arrived, before anything has been done for it.

        Raises:
            QueueFull
        """
        self.sent_away[Reason.QUEUE_FULL] += 1
        self._tell(Reason.QUEUE_FULL)
        raise self._error(Reason.QUEUE_FULL)

    def send_away(self, command: events.ShedRequest) -> None:
        """End it, with an answer that says when to come again."""
        self._since_s.pop(command.request, None)
        self.sent_away[command.reason] += 1
        self._fleet.end(command.request, self._error(command.reason))
        self._tell(command.reason)

    @property
    def retry_after_s(self) -> float:
        """How long the last one waited that was given room: so long is the line."""
        return min(MAX_RETRY_AFTER_S, max(1.0, self._last_wait_s))

    def collect(self) -> Metric:
        """The counts for Prometheus."""
        family = CounterMetricFamily(
            "melld_requests_sent_away", "Requests that ended before they began, for want of room.", labels=["cause"]
        )
        for reason, count in self.sent_away.items():
            family.add_metric([reason], count)
        return family

    def _error(self, reason: Reason) -> MelldError:
        kind = QueueFull if reason is Reason.QUEUE_FULL else WaitedTooLong
        return kind(len(self._since_s), self.retry_after_s)

    def _tell(self, reason: Reason) -> None:
        """One line for many: under overload they come by the hundred."""
        self._untold += 1
        now_s = self._clock()
        if now_s - self._told_s >= TELL_EVERY_S:
            log.warning("%d requests were sent away, the last because: %s", self._untold, reason)
            self._untold, self._told_s = 0, now_s
