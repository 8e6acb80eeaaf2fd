"""What the service promises each request: a first token in time, and a pace."""

import msgspec

MEAN_OVER_TOKENS = 32
"""An answer's pace is judged over at least so many tokens: one chunk beside a short answer makes it no slow stream."""


class Targets(msgspec.Struct, frozen=True):
    """Service targets.  `itl_s`: mean seconds between tokens; None: any pace will do.

    `ttft_s`: seconds until the first token, or `prefill_times` as long as the prompt alone takes, if that is longer.
    """

    itl_s: float | None = None
    ttft_s: float = 2.0
    prefill_times: float = 4.0

    def first_token_s(self, prefill_s: float) -> float:
        """Return how long a request may wait for its first token, its prompt's computing included."""
        return max(self.ttft_s, self.prefill_times * prefill_s)
