"""The metrics of the HTTP side: `melld_http_*` on /metrics.

One series per route and status; unknown paths never become labels.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge


class HttpMetrics:
    """The counters of one daemon's API."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter(
            "melld_http_answers", "Requests answered, by route and status", ["route", "status"], registry=registry
        )
        self.in_flight = Gauge("melld_http_calls_in_flight", "Calls that wait for an engine", registry=registry)
        self.disconnects = Counter(
            "melld_http_disconnects", "Clients that left before their answer was complete", registry=registry
        )
        self.slow_readers = Counter(
            "melld_http_slow_readers", "Streams ended because their client read nothing", registry=registry
        )
        self.failed_streams = Counter(
            "melld_http_failed_streams", "Streams that ended in an error event", registry=registry
        )

    def answered(self, route: str, status: int) -> None:
        """Count one answer."""
        self._answers.labels(route, str(status)).inc()
