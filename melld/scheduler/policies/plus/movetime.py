"""Estimate of how long moves take, from those that have ended.

Owns a line fitted through (bytes, seconds), with newer moves weighted more; knows nothing of links or transports.
"""

FORGETTING = 0.98  # weight of all earlier moves relative to the next one


class MoveTimes:
    """Least squares with forgetting: `expected_s` is 0 until the first move has ended."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._bytes = self._seconds = 0.0  # weighted means
        self._variance = self._covariance = 0.0

    def took(self, kv_bytes: int, seconds: float) -> None:
        """Record a finished move."""
        self._weight = self._weight * FORGETTING + 1.0
        share = 1.0 / self._weight
        bytes_off, seconds_off = kv_bytes - self._bytes, seconds - self._seconds
        self._bytes += share * bytes_off
        self._seconds += share * seconds_off
        self._variance += share * (bytes_off * (kv_bytes - self._bytes) - self._variance)
        self._covariance += share * (bytes_off * (seconds - self._seconds) - self._covariance)

    def expected_s(self, kv_bytes: float) -> float:
        """Return how long a move of that many bytes should take; never decreases with the size."""
        slope = max(self._covariance / self._variance, 0.0) if self._variance > 0.0 else 0.0
        return max(self._seconds + slope * (kv_bytes - self._bytes), 0.0)
