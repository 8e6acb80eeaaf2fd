"""How long to keep a worker that is not needed: ski rental on how soon so many workers were needed again.

Owns the gaps between two needs of so many workers.  Never puts a worker to sleep.
"""

import collections

GAPS = 32
"""Number of latest gaps that count."""


class Rental:
    """Gaps by number of workers."""

    def __init__(self) -> None:
        self._count = 0
        self._fell_s: dict[int, float] = {}
        self._gaps_s: dict[int, collections.deque[float]] = {}

    def needed(self, count: int, now_s: float) -> None:
        """Record how many workers are needed now."""
        for level in range(self._count + 1, count + 1):
            if (fell_s := self._fell_s.pop(level, None)) is not None:
                self._gaps_s.setdefault(level, collections.deque(maxlen=GAPS)).append(now_s - fell_s)
        for level in range(count + 1, self._count + 1):
            self._fell_s[level] = now_s
        self._count = count

    def since_s(self, level: int, now_s: float) -> float:
        """Return for how long fewer than `level` workers have been needed."""
        return now_s - self._fell_s.get(level, now_s)

    def keep_s(self, level: int, price_s: float) -> float:
        """Return how long to keep the worker of that level: least of its cost while kept and of waking it again."""
        gaps_s = self._gaps_s.get(level)
        if not gaps_s:
            return price_s
        best_s, best = float("inf"), 0.0
        for kept_s in (0.0, *sorted(gaps_s)):
            cost_s = sum(min(gap_s, kept_s) + price_s * (gap_s > kept_s) for gap_s in gaps_s)
            if cost_s < best_s:
                best_s, best = cost_s, kept_s
        return best
