"""Lengths of ended answers, and what they say of the requests that run: how many will miss their pace.

    delay of a request      seconds of prompts that its worker has accepted since it was placed
    tokens that it needs    delay / (target - step): with so many, steps below the target have made up for the delay
    it misses its pace      if it ends before that: how likely that is, the lengths of ended answers say

Owns a histogram with forgetting.  Never decides where requests go.
"""

import math

from melld.scheduler.policies.slo import constants
from melld.scheduler.targets import MEAN_OVER_TOKENS


class Answers:
    """Lengths of ended answers."""

    def __init__(self) -> None:
        weight, share = constants.PRIOR_WEIGHT, 1.0 - math.exp(-constants.BUCKET_TOKENS / constants.ANSWER_TOKENS)
        self._weights = [weight * share * (1.0 - share) ** bucket for bucket in range(constants.BUCKETS + 1)]
        self._newest_weight = 1.0
        self._ended = 0
        self._longer: list[float] = []
        self._halves: list[tuple[int, int, float]] = []  # point, tokens that its mean is taken over, half its share
        self._refresh()

    def ended(self, tokens: int) -> None:
        """Record an answer."""
        self._newest_weight *= 1.0 + 1.0 / constants.REMEMBERED
        self._weights[min(tokens // constants.BUCKET_TOKENS, constants.BUCKETS)] += self._newest_weight
        self._ended += 1
        if self._ended % constants.REFRESH == 0:
            self._refresh()

    def longer(self, tokens: float) -> float:
        """Return the share of answers that are longer."""
        place = min(tokens / constants.BUCKET_TOKENS, float(constants.BUCKETS))
        bucket = int(place)
        low, high = self._longer[bucket], self._longer[bucket + 1]
        return low + (high - low) * (place - bucket)

    def share_of_token(self) -> float:
        """Return the mean share of an answer that one of its tokens is: what a pause adds to the time per token."""
        shares = (weight / ((bucket + 0.5) * constants.BUCKET_TOKENS) for bucket, weight in enumerate(self._weights))
        return sum(shares) / sum(self._weights)

    def made_slow(self, delay_s: float, more_s: float, had_tokens: float, gain_s: float) -> float:
        """Return how much likelier a request misses its pace after another delay of `more_s`.

        `gain_s`: how much shorter than the target a step is; `had_tokens`: what the request has had.
        """
        before = max(had_tokens, delay_s / gain_s, MEAN_OVER_TOKENS)
        after = max(had_tokens, (delay_s + more_s) / gain_s)
        left = self.longer(had_tokens)
        return (self.longer(before) - self.longer(after)) / left if after > before and left > 0.0 else 0.0

    def slow(self, step_s: float, itl_s: float, prefilling: float, burst_s: float) -> float:
        """Return the share of answers that miss the pace `itl_s` beside so many seconds of prompts per second.

        Prompts come at random, each of about `burst_s`: the sum of those that come while an answer may last has about a
        normal distribution.
        """
        share, decoding, sqrt, erfc = 0.0, 1.0 - prefilling, math.sqrt, math.erfc
        for tokens, counted, half in self._halves:
            allowed_s = counted * itl_s
            spare_s = allowed_s * decoding - tokens * step_s
            deviation_s = sqrt(2.0 * prefilling * allowed_s * burst_s)
            if deviation_s > 0.0:
                share += half * erfc(spare_s / deviation_s)
            elif spare_s < 0.0:
                share += 2.0 * half
        return share

    def _refresh(self) -> None:
        self._weights = [weight / self._newest_weight for weight in self._weights]
        self._newest_weight = 1.0
        total, beyond = sum(self._weights), 0.0
        self._longer = [0.0] * (constants.BUCKETS + 2)
        for bucket in range(constants.BUCKETS, -1, -1):
            beyond += self._weights[bucket]
            self._longer[bucket] = beyond / total
        longer = [1.0, *map(self.longer, constants.POINTS)]
        self._halves = [
            (tokens, max(tokens, MEAN_OVER_TOKENS), (last - beyond) * 0.5)
            for tokens, last, beyond in zip(constants.POINTS, longer, longer[1:], strict=False)
        ]
