"""Measures how late the event loop runs, which delays every token of every stream.

Owns three metrics: `melld_event_loop_delay_seconds`, a histogram of how late a timer fired,
`melld_event_loop_delay_max_seconds`, the longest delay of the last one to two minutes, and `melld_event_loop_tasks`,
the tasks that have not ended.  A sample costs about ten microseconds.
"""

import asyncio

from prometheus_client import CollectorRegistry, Gauge, Histogram

INTERVAL_S = 0.01
WINDOW_S = 60.0
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class LoopProbe:
    """A timer that measures its own lateness.  Call `start` and `stop` on the loop that it watches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._delays = Histogram(
            "melld_event_loop_delay_seconds",
            "How late timers of the daemon's event loop fire",
            buckets=BUCKETS,
            registry=registry,
        )
        gauge = Gauge(
            "melld_event_loop_delay_max_seconds",
            "The longest delay of the daemon's event loop in the last one to two minutes",
            registry=registry,
        )
        gauge.set_function(self.max_delay_s)
        tasks = Gauge(
            "melld_event_loop_tasks", "Tasks of the daemon's event loop that have not ended", registry=registry
        )
        tasks.set_function(self.tasks)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._window_ends = 0.0
        self._worst_s = 0.0
        self._worst_before_s = 0.0

    def start(self) -> None:
        """Start to sample every INTERVAL_S."""
        loop = self._loop = asyncio.get_running_loop()
        self._window_ends = loop.time() + WINDOW_S
        self._arm(loop)

    def stop(self) -> None:
        """Stop sampling; safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def max_delay_s(self) -> float:
        """Return the longest delay of this window of a minute and the one before it."""
        return max(self._worst_s, self._worst_before_s)

    def tasks(self) -> int:
        """Return the number of unfinished tasks; 0 before `start`."""
        return len(asyncio.all_tasks(self._loop)) if self._loop is not None else 0

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + INTERVAL_S
        self._timer = loop.call_at(due, self._fired, loop, due)

    def _fired(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        delay_s = max(0.0, now - due)
        self._delays.observe(delay_s)
        if now >= self._window_ends:
            self._worst_before_s, self._worst_s = self._worst_s, 0.0
            self._window_ends = now + WINDOW_S
        self._worst_s = max(self._worst_s, delay_s)
        self._arm(loop)
