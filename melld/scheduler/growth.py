"""Estimate of the growth of running requests, from their reported sizes alone.

Owns moving averages, per worker and over all; knows nothing of future lengths.
"""

from collections.abc import Iterable

from melld.scheduler.state import Worker

SMOOTHING = 0.2  # weight of the newest observation
WINDOW_S = 0.999  # of one observation: sizes grow in blocks, so most do not grow at all in a shorter time
STEPS_PER_OCTAVE = 16  # `ahead_bytes` changes in steps, so that a change of the rate does not re-sort every worker


class GrowthRate:
    """Bytes per second that one running request adds, averaged over all."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._last_s: float | None = None
        self._step_bytes = 0.0

    def observe(self, now_s: float, workers: Iterable[Worker]) -> None:
        """Add the growth of these workers' requests since the last observation (`growing`, `grown_bytes`).

        Do nothing until a window has passed.  A request that took no block in it counts too: it will take one in a
        later window.  One whose prompt still waits does not: it will grow as the others do.
        """
        last_s = self._last_s
        if last_s is not None and now_s - last_s < WINDOW_S:
            return
        self._last_s = now_s
        running = grown_bytes = 0
        for worker in workers:
            if requests := sum(one.decodes for one in worker.requests.values()) or worker.growing:
                running += requests
                grown_bytes += worker.grown_bytes
                if last_s is not None:
                    rate = worker.grown_bytes / requests / (now_s - last_s)
                    worker.growth_bytes_s = smoothed(worker.growth_bytes_s, rate)
                worker.growing = worker.grown_bytes = 0
        if running and last_s is not None:
            self.bytes_per_s = smoothed(self.bytes_per_s, grown_bytes / running / (now_s - last_s))

    def ahead_bytes(self, horizon_s: float) -> int:
        """Return what one request adds within the horizon, on average; changes only in steps of the rate."""
        if not horizon_s:
            return 0
        if not self._step_bytes or abs(self.bytes_per_s - self._step_bytes) * STEPS_PER_OCTAVE > self._step_bytes:
            self._step_bytes = self.bytes_per_s
        return int(self._step_bytes * horizon_s)


def smoothed(average: float, newest: float) -> float:
    """Return the average moved towards the newest value; the first observation is taken as it is."""
    return average + SMOOTHING * (newest - average) if average else newest
