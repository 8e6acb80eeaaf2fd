"""Average time that requests run, from those that have ended.

Owns one moving average, which scales the times of `mell-plus`: a second means more where requests end sooner.  Never
predicts when a request ends.  Even exact knowledge of that did not lower the number of GPUs at equal moves: moves bring
room from where requests have ended to where others grow, and that room is needed meanwhile, whichever ends next.
"""

REFERENCE_S = 80.0  # the mean life that the settings of `mell-plus` assume; used until others are seen
SMOOTHING = 0.005  # weight of the newest: short requests end first, so a few say little
SLOWEST, FASTEST = 2.0, 0.1  # the scale is kept between these


class Lifetimes:
    """Mean time from a request's placement to its end."""

    def __init__(self) -> None:
        self.mean_s = REFERENCE_S

    def ended(self, seconds: float) -> None:
        """Record the run time of an ended request."""
        self.mean_s += SMOOTHING * (seconds - self.mean_s)

    @property
    def pace(self) -> float:
        """Seconds that correspond to one second of the settings."""
        return min(max(self.mean_s / REFERENCE_S, FASTEST), SLOWEST)
