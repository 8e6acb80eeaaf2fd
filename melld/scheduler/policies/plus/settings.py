"""The trade of room against moves that `mell-plus` makes, and three points of it."""

import msgspec


class PlusSettings(msgspec.Struct, frozen=True):
    """The trade of room against moves.  Seconds are for requests that run 80 s on average, see `at_pace`.

    `dispatch_life_s`: an arrival keeps its worker alive so long, if it can.  `enough_life_s`: more life than this is
    worth nothing in a move.  `chain_life_s`: two moves in a row are made only if all three workers then live so long.
    `push_life_s`: the same for pushing aside.  `drain_life_s`: what a drain leaves to those that take its requests.
    `drain_utilisation`: how full the others may become on average.  `price_s`: the life that a request of a whole
    capacity must gain more than a tiny one to be moved in its stead.  `candidates`: k of each kind; an overload, which
    else wakes a worker, looks at `relief_candidates`.
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
        """The same for requests that run `pace` times as long."""
        return msgspec.structs.replace(
            self,
            dispatch_life_s=self.dispatch_life_s * pace,
            enough_life_s=self.enough_life_s * pace,
            chain_life_s=self.chain_life_s * pace,
            push_life_s=self.push_life_s * pace,
            drain_life_s=self.drain_life_s * pace,
            price_s=self.price_s * pace,
        )


LEAN = PlusSettings(dispatch_life_s=20.0, enough_life_s=20.0, chain_life_s=8.0, push_life_s=8.0, drain_utilisation=0.9)
BALANCED = PlusSettings()
TIGHT = PlusSettings(
    dispatch_life_s=8.0, enough_life_s=3.0, drain_life_s=1.0, drain_utilisation=0.99, drain_attempts=12
)
