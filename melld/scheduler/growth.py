"""How fast running requests have been growing, from their reported sizes alone.

Owns one moving average; knows nothing of lengths to come.
"""

SMOOTHING = 0.1  # weight of the newest observation
STEPS_PER_OCTAVE = 16  # `ahead_bytes` changes in steps, so that a change of the rate does not re-sort every worker


class GrowthRate:
    """Bytes per second that one growing request adds, averaged over all of them."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._last_s: float | None = None
        self._step_bytes = 0.0

    def observe(self, now_s: float, grown_bytes: int, requests: int) -> None:
        """That many requests grew by that much together since the last observation."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or now_s <= last_s or not requests:
            return
        rate = grown_bytes / requests / (now_s - last_s)
        if self.bytes_per_s == 0.0:
            self.bytes_per_s = rate
        else:
            self.bytes_per_s += SMOOTHING * (rate - self.bytes_per_s)

    def ahead_bytes(self, horizon_s: float) -> int:
        """What one request adds within the horizon, at least; moves only when the rate has changed by a step."""
        if not horizon_s:
            return 0
        if not self._step_bytes or abs(self.bytes_per_s - self._step_bytes) * STEPS_PER_OCTAVE > self._step_bytes:
            self._step_bytes = self.bytes_per_s
        return int(self._step_bytes * horizon_s)
