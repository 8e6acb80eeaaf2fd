"""Measures how many seconds of prompts come per second: a mean in which older prompts fade.

Owns the sums of one such mean.  Never decides how many workers that takes.
"""

import math

SURE = 2.0
"""Standard deviations by which a rate that prompts may show by chance alone is discounted."""


class PromptRate:
    """Seconds of prompts accepted per second.  `memory_s`: the time in which a prompt's weight falls to 1/e."""

    __slots__ = ("_at_s", "_begun_s", "_memory_s", "_squares", "_sum")

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._sum = self._squares = self._at_s = 0.0
        self._begun_s: float | None = None

    def accept(self, prefill_s: float, now_s: float) -> None:
        """Note a prompt that takes so long."""
        self._fade(now_s)
        self._sum += prefill_s / self._memory_s
        self._squares += prefill_s * prefill_s / self._memory_s
        if self._begun_s is None and prefill_s > 0.0:
            self._begun_s = now_s

    def mean(self, now_s: float, least_seen: float) -> float:
        """Return the rate; soon after the first prompt over the time since, but over `least_seen` of the memory."""
        if self._begun_s is None:
            return 0.0
        self._fade(now_s)
        seen = 1.0 - math.exp((self._begun_s - now_s) / self._memory_s)
        return self._sum / max(seen, least_seen)

    def surely(self, now_s: float) -> float:
        """Return the rate that prompts which come at random surely have: the seen one, less what chance may add."""
        self._fade(now_s)
        return self._sum - SURE * math.sqrt(self._squares / (2.0 * self._memory_s))

    @property
    def burst_s(self) -> float:
        """Return the mean of the prompts, the long ones counting for more: of the squares by that of the seconds."""
        return self._squares / self._sum if self._sum > 0.0 else 0.0

    def _fade(self, now_s: float) -> None:
        kept = math.exp((self._at_s - now_s) / self._memory_s)
        self._sum *= kept
        self._squares *= kept
        self._at_s = now_s
