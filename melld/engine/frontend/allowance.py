"""What a client may compile on workers without a turn at a judge.

Pure.  A known good constraint needs no judge, but a worker still compiles it: beyond its allowance a client waits for
a judge with these too.
"""

CHEAP_S = 0.01
ALLOWED_SHARE = 0.25


class Allowance:
    """The seconds of compilation on workers that each client may use without a turn at a judge."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._spent: dict[str, tuple[float, float]] = {}

    def spend(self, client: str, cost_s: float, now_s: float) -> bool:
        """Spend `cost_s` and return True if the client has it left; it regains a quarter of the time that passes."""
        if cost_s <= CHEAP_S:
            return True
        spent_s, at_s = self._spent.get(client, (0.0, now_s))
        spent_s = max(0.0, spent_s - ALLOWED_SHARE * (now_s - at_s)) + cost_s
        if spent_s > self._burst_s:
            return False
        self._spent[client] = (spent_s, now_s)
        return True
