"""A fair queue of constraints that wait for a judge.

Pure.  Clients take turns, and each has one constraint at a judge at a time, so that nobody's heavy constraints keep
others' from the second judge.  Within a client: first come, first served.  A known good constraint needs no judge,
but a worker still compiles it: beyond its allowance a client queues for a judge with these too.
"""

from typing import Generic, TypeVar

Item = TypeVar("Item")


class JudgeQueue(Generic[Item]):
    """The waiting items by client."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Item, None]] = {}
        self._busy: set[str] = set()

    @property
    def ready(self) -> int:
        """Return the number of items that `take` would return in a row."""
        return len(self._waiting.keys() - self._busy)

    def add(self, client: str, item: Item) -> None:
        """Append an item to its client's queue."""
        self._waiting.setdefault(client, {})[item] = None

    def take(self) -> tuple[str, Item] | None:
        """Take the next item of a client without one at a judge; the client then has one there until `done`."""
        for client, items in self._waiting.items():
            if client in self._busy:
                continue
            item = next(iter(items))
            self.remove(client, item)
            if client in self._waiting:  # behind everybody else
                self._waiting[client] = self._waiting.pop(client)
            self._busy.add(client)
            return client, item
        return None

    def done(self, client: str) -> None:
        """Record that the client's item has left its judge."""
        self._busy.discard(client)

    def remove(self, client: str, item: Item) -> None:
        """Drop an item if it still waits."""
        items = self._waiting.get(client, {})
        items.pop(item, None)
        if not items:
            self._waiting.pop(client, None)


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
