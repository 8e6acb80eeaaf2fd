"""How long requests run, from those that have ended during this run.

Owns one moving average, by which `mell-plus` sets the scale of its lives: seconds mean more where requests end sooner.
It does not predict who ends when.  Even exact knowledge of that did not lower the GPUs at equal moves: moves carry room
from where requests have ended to where others grow, and that room is needed in the meantime whoever ends next.
"""

REFERENCE_S = 80.0  # the mean life for which the settings of `mell-plus` are written; assumed until others are seen
SMOOTHING = 0.005  # weight of the newest: short requests end first, so a few say little
SLOWEST, FASTEST = 2.0, 0.1  # the scale is kept between these


class Lifetimes:
    """The mean time that requests ran from their placement to their end."""

    def __init__(self) -> None:
        self.mean_s = REFERENCE_S

    def ended(self, seconds: float) -> None:
        """A request has ended after so long."""
        self.mean_s += SMOOTHING * (seconds - self.mean_s)

    @property
    def pace(self) -> float:
        """Seconds that stand for one second of the settings."""
        return min(max(self.mean_s / REFERENCE_S, FASTEST), SLOWEST)
