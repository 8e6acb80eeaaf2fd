"""Remembers how soon so many workers were needed again, by their number: the history behind keeping idle workers.

Owns the latest gaps between two needs.  Never decides how long a worker is kept.
"""

import collections
from collections.abc import Sequence

GAPS = 32
"""Number of latest gaps that count."""


class Gaps:
    """Gaps between two needs of so many workers."""

    def __init__(self) -> None:
        self._count = 0
        self._fell_s: dict[int, float] = {}  # by number of workers: since when fewer are needed
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

    def of(self, level: int) -> Sequence[float]:
        """Return the gaps until `level` workers were needed again, in seconds; the latest is last."""
        return self._gaps_s.get(level, ())
