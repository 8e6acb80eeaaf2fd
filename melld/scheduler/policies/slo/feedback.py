"""What ended requests say about the plan: more caution where too many were late or slow, less where none were.

Owns the price of a late start and the caution about prompts that come at random.
"""

from melld.scheduler.targets import MEAN_OVER_TOKENS, Targets

PLACEMENTS, ENDED = 100, 200
LEAST_PRICE_S, FIRST_PRICE_S, MOST_PRICE_S = 4.0, 10.0, 40.0
PRICE_UP, PRICE_DOWN = 1.25, 0.94
LEAST_CAUTION, FIRST_CAUTION, MOST_CAUTION = 0.17, 0.25, 1.0
CAUTION_UP, CAUTION_DOWN = 1.15, 0.95


class Feedback:
    """`price_s`: what a late start costs beyond the waking, in seconds of a worker.  `caution`: see `Demand.look`."""

    def __init__(self, targets: Targets) -> None:
        self.price_s = FIRST_PRICE_S
        self.caution = FIRST_CAUTION
        self._targets = targets
        self._placed = self._late = self._ended = self._slow = 0

    def started(self, ttft_s: float, prefill_s: float) -> None:
        """Record a request's first token."""
        self._placed += 1
        self._late += ttft_s > self._targets.first_token_s(prefill_s)
        if self._placed == PLACEMENTS:
            times = PRICE_UP if self._late > self._targets.missed * PLACEMENTS else PRICE_DOWN
            self.price_s = min(max(self.price_s * times, LEAST_PRICE_S), MOST_PRICE_S)
            self._placed = self._late = 0

    def ended(self, seconds: float, output_tokens: int, itl_s: float | None) -> None:
        """Record the seconds from a request's first token to its last; `itl_s`: the pace that it was promised."""
        if itl_s is None:
            return
        self._ended += 1
        self._slow += seconds / max(output_tokens - 1, MEAN_OVER_TOKENS) > itl_s
        if self._ended == ENDED:
            times = CAUTION_UP if self._slow > self._targets.missed * ENDED else CAUTION_DOWN
            self.caution = min(max(self.caution * times, LEAST_CAUTION), MOST_CAUTION)
            self._ended = self._slow = 0
