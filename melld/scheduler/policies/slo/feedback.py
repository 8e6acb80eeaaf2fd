"""Learns from ended requests: more caution where too many were late or slow, less where none were.

Owns the price of a worker that is missing, and the caution about prompts that come at random.
"""

from melld.scheduler.policies.slo import constants
from melld.scheduler.policies.slo.missing import MissingWorkers
from melld.scheduler.targets import MEAN_OVER_TOKENS, Targets


class Feedback:
    """`price_s`: what a missing worker costs beyond its waking, in seconds of one.

    `caution`: see `Demand.look`; at most all of the randomness.  As many first tokens are judged together as one may be
    late of, but no more than `MOST_JUDGED`, and twice as many paces.
    """

    def __init__(self, targets: Targets, missing: MissingWorkers) -> None:
        self.price_s = constants.FIRST_PRICE_S
        self.caution = constants.FIRST_CAUTION
        self._targets = targets
        self._missing = missing
        self._placed = self._late = self._ended = self._slow = 0

    def started(self, ttft_s: float, prefill_s: float) -> bool:
        """Record a request's first token; return True if it came in time."""
        is_late = ttft_s > self._targets.first_token_s(prefill_s)
        self._placed += 1
        self._late += is_late
        may = self._targets.missed * self._placed
        if may >= 1.0 or self._placed >= constants.MOST_JUDGED:
            self._reprice(_rise(self._late, may) if self._late > may else constants.PRICE_DOWN)
            self._placed = self._late = 0
        return not is_late

    def ended(self, seconds: float, output_tokens: int, itl_s: float | None) -> bool:
        """Record the seconds from a request's first token to its last; return True if they kept the pace `itl_s`."""
        if itl_s is None:
            return True
        is_slow = seconds / max(output_tokens - 1, MEAN_OVER_TOKENS) > itl_s
        self._ended += 1
        self._slow += is_slow
        may = self._targets.missed * self._ended
        if may >= 2.0 or self._ended >= 2 * constants.MOST_JUDGED:
            self.caution *= constants.CAUTION_UP if self._slow > may else constants.CAUTION_DOWN
            self.caution = min(max(self.caution, constants.LEAST_CAUTION), 1.0)
            if self._slow > may:
                self._reprice(_rise(self._slow, may))
            self._ended = self._slow = 0
        return not is_slow

    def _reprice(self, times: float) -> None:
        most_s = max(constants.MOST_PRICE_S, constants.WORTH * self._missing.cost_s)
        self.price_s = min(max(self.price_s * times, constants.LEAST_PRICE_S), most_s)


def _rise(missed: int, may: float) -> float:
    """Return by how much the price rises where so many requests missed, more than may."""
    times_over = missed / max(may, 1e-9) - 1.0
    return float(constants.PRICE_UP ** min(times_over, constants.MOST_OVER))
