"""How long to keep a worker that is not needed: what it costs to keep, against what waking it again costs.

Owns how soon so many workers were needed again.  Pure: time is an argument.
"""

import collections
import math
from collections.abc import Sequence

GAPS = 32
"""Number of latest gaps that count."""
MARGIN = 1.25
"""The next gap may be longer than one that was seen: a worker that bridges it is kept so many times as long."""


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


def kept_s(gaps_s: Sequence[float], price_s: float) -> float:
    """Return how long to keep the worker: least of its cost while kept and of waking it again.

    `price_s`: what waking costs, in seconds of a worker.  Without history as long as that.  A gap that outlasts all
    others, g the longest of them, is borne for t, until t is the price times g / (g + t): the longer it lasts beyond
    them, the less is it thought to end soon.
    """
    if not gaps_s:
        return price_s
    best_s, best = float("inf"), 0.0
    for stay_s in (0.0, *(MARGIN * gap_s for gap_s in sorted(gaps_s))):
        cost_s = sum(min(gap_s, stay_s) + price_s * (gap_s > stay_s) for gap_s in gaps_s)
        if cost_s < best_s:
            best_s, best = cost_s, stay_s
    longest_s = max(gaps_s)
    if best < longest_s:
        return best
    return max(best, (math.sqrt(longest_s**2 + 4.0 * longest_s * price_s) - longest_s) / 2.0)
