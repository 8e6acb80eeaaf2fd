"""Decides how long to keep a worker that is not needed: ski rental on how soon so many workers were needed again."""

from collections.abc import Sequence


def kept_s(gaps_s: Sequence[float], price_s: float) -> float:
    """Return how long to keep the worker: least of its cost while kept and of waking it again.

    `price_s`: what waking costs, in seconds of a worker.  Without history as long as that.
    """
    if not gaps_s:
        return price_s
    best_s, best = float("inf"), 0.0
    for stay_s in (0.0, *sorted(gaps_s)):
        cost_s = sum(min(gap_s, stay_s) + price_s * (gap_s > stay_s) for gap_s in gaps_s)
        if cost_s < best_s:
            best_s, best = cost_s, stay_s
    return best
