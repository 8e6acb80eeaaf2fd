"""Settings of `mell-plus`: its trade-off of room against moves, and the scale of its times."""

import msgspec

REFERENCE_S = 80.0
"""The mean life that the settings assume; used until others are seen."""
SMOOTHING = 0.005  # weight of the newest: short requests end first, so a few say little
SLOWEST, FASTEST = 2.0, 0.1  # the scale is kept between these


class PlusSettings(msgspec.Struct, frozen=True):
    """Trade-off of room against moves.  Seconds are for requests that run 80 s on average, see `at_pace`.

    `dispatch_life_s`: life that a worker should keep after an arrival.  `enough_life_s`: a move gains nothing from more
    life than this.  `chain_life_s`: life that all three workers must keep after two moves in a row.  `push_life_s`: the
    same for pushing aside.  `drain_life_s`: life that a drain leaves to the takers.  `drain_utilisation`: how full the
    others may become on average.  `price_s`: extra life that a request of a whole capacity must gain to be moved
    instead of a tiny one.  `candidates`: k of each kind; for an overload, which would else wake a worker,
    `relief_candidates`.
    """

    dispatch_life_s: float = 9.0
    enough_life_s: float = 6.0
    chain_life_s: float = 0.3
    push_life_s: float = 0.1
    drain_life_s: float = 10.0
    drain_utilisation: float = 0.94
    drain_attempts: int = 6
    price_s: float = 3.0
    candidates: int = 12
    relief_candidates: int = 24

    def at_pace(self, pace: float) -> "PlusSettings":
        """Return the settings for requests that run `pace` times as long: all seconds times that."""
        settings = msgspec.structs.asdict(self)
        return PlusSettings(
            **{name: value * pace if name.endswith("_s") else value for name, value in settings.items()}
        )


BALANCED = PlusSettings()


class Lifetimes:
    """Mean time from a request's placement to its end, a moving average: a second means more where requests end sooner.

    Never predicts when a request ends.  Even exact knowledge of that did not lower the number of GPUs at equal moves:
    moves bring room from where requests have ended to where others grow, and that room is needed meanwhile, whichever
    ends next.
    """

    def __init__(self) -> None:
        self.mean_s = REFERENCE_S

    def ended(self, seconds: float) -> None:
        """Record the run time of an ended request."""
        self.mean_s += SMOOTHING * (seconds - self.mean_s)

    @property
    def pace(self) -> float:
        """Return the seconds that correspond to one second of the settings."""
        return min(max(self.mean_s / REFERENCE_S, FASTEST), SLOWEST)
