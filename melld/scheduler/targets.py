"""The promise to each request: a first token in time, and a pace."""

import msgspec

MEAN_OVER_TOKENS = 32
"""An answer's pace is judged over at least so many tokens: one chunk beside a short answer makes it no slow stream."""
DEFAULT_ITL_S, DEFAULT_ITL_STEPS = 0.05, 2.0
LATE_TIMES = 4.0
"""A first token that can no longer come in time is due anew after so many times what it was given."""
DIGITS = 9


class Targets(msgspec.Struct, frozen=True):
    """Service targets.

    `itl_s`: mean seconds between tokens, or `itl_steps` times a step with one request, if that is longer; None: any
    pace will do.  `ttft_s`: seconds until the first token, or `prefill_times` as long as the prompt alone takes, if
    that is longer.  `sheds`: with all workers in use, a request whose first token can no longer come in time is sent
    away, so that the others are served in time; else it waits on.  `attainment`: the part of the requests that the plan
    aims to serve in time, and the part that it aims to serve in pace.
    """

    itl_s: float | None = None
    itl_steps: float = 0.0
    ttft_s: float = 2.0
    prefill_times: float = 4.0
    sheds: bool = True
    attainment: float = 0.99

    @property
    def missed(self) -> float:
        """Return the share of the requests that may miss one of the targets."""
        return round(1.0 - self.attainment, DIGITS)

    def pace_s(self, lone_step_s: float) -> float | None:
        """Return the longest promised mean time between tokens if a lone request's step takes `lone_step_s`."""
        return None if self.itl_s is None else max(self.itl_s, self.itl_steps * lone_step_s)

    def aimed_pace_s(self, lone_step_s: float) -> float | None:
        """Return the pace to plan for: the promised one, or the untargeted one if not even a lone request keeps it.

        Else each request would get a worker of its own, and still be too slow.
        """
        pace_s = self.pace_s(lone_step_s)
        return pace_s if pace_s is None or lone_step_s <= pace_s else DEFAULT_ITL_STEPS * lone_step_s

    def first_token_s(self, prefill_s: float) -> float:
        """Return the time to first token that a request may have, including its prefill."""
        return max(self.ttft_s, self.prefill_times * prefill_s)

    def later_s(self, prefill_s: float) -> float:
        """Return how much later a first token becomes due once it can no longer be on time.

        Whoever is late goes behind those who can still be served in time, else all would be late.
        """
        return LATE_TIMES * self.first_token_s(prefill_s)


def promised(itl_s: float | None, ttft_s: float, sheds: bool, attainment: float) -> Targets:
    """Return the targets of a service with this configuration.

    Where none is configured the pace is one that is faster than people read, on a slow model half of its best.
    """
    itl_steps = DEFAULT_ITL_STEPS if itl_s is None else 0.0
    return Targets(DEFAULT_ITL_S if itl_s is None else itl_s, itl_steps, ttft_s, sheds=sheds, attainment=attainment)
