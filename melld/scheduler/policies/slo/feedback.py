"""What ended requests say about the plan: more caution where too many were late or slow, less where none were.

Owns the price of a late start and the margin of the pace.
"""

from melld.scheduler.targets import MEAN_OVER_TOKENS, Targets

PLACEMENTS, LATE = 100, 0.01
ENDED, SLOW = 200, 0.006
LEAST_PRICE_S, FIRST_PRICE_S, MOST_PRICE_S = 4.0, 10.0, 40.0
LEAST_MARGIN, MOST_MARGIN = 0.8, 1.15


class Feedback:
    """`price_s`: what a late start costs beyond the waking, in seconds of a worker.  `margin`: of the pace."""

    def __init__(self, targets: Targets) -> None:
        self.price_s = FIRST_PRICE_S
        self.margin = 1.0
        self._targets = targets
        self._placed = self._late = self._ended = self._slow = 0

    def started(self, ttft_s: float, prefill_s: float) -> None:
        """Record a request's first token."""
        self._placed += 1
        self._late += ttft_s > self._targets.first_token_s(prefill_s)
        if self._placed == PLACEMENTS:
            worse = self._late > LATE * PLACEMENTS
            self.price_s = min(max(self.price_s * (1.25 if worse else 0.94), LEAST_PRICE_S), MOST_PRICE_S)
            self._placed = self._late = 0

    def ended(self, seconds: float, output_tokens: int, itl_s: float | None) -> None:
        """Record the seconds from a request's first token to its last; `itl_s`: the pace that it was promised."""
        if itl_s is None:
            return
        self._ended += 1
        self._slow += seconds / max(output_tokens - 1, MEAN_OVER_TOKENS) > itl_s
        if self._ended == ENDED:
            worse = self._slow > SLOW * ENDED
            self.margin = min(max(self.margin * (0.97 if worse else 1.015), LEAST_MARGIN), MOST_MARGIN)
            self._ended = self._slow = 0
