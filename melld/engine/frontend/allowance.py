"""How much a client may have compiled on workers without waiting for a judge.

Pure.  A constraint known to be good needs no judge, but a worker still compiles it: a client that has used up its
allowance waits for a judge even with these.
"""

CHEAP_S = 0.01
ALLOWED_SHARE = 0.25


class Allowance:
    """The seconds of compilation on workers that each client may use without waiting for a judge."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._spent: dict[str, tuple[float, float]] = {}

    def spend(self, client: str, cost_s: float, now_s: float) -> bool:
        """Spend `cost_s` and return True if that much is left; a quarter of the elapsed time is regained."""
        if cost_s <= CHEAP_S:
            return True
        spent_s, at_s = self._spent.get(client, (0.0, now_s))
        spent_s = max(0.0, spent_s - ALLOWED_SHARE * (now_s - at_s)) + cost_s
        if spent_s > self._burst_s:
            return False
        self._spent[client] = (spent_s, now_s)
        return True
