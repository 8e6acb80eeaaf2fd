"""Sorted index of things by a key: "roomiest", "latest" and "smallest that fits" in O(log N).

Owns the order alone.  A ladder is a sorted list: at ten thousand entries, moving its tail by memmove is cheaper than a
tree in Python.  Each entry is one number, the key above the order: numbers compare faster than tuples.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

ORDER_BITS = 40
ORDER_MASK = (1 << ORDER_BITS) - 1


class Ranked(Protocol):
    """Interface of a ladder's entries: `order` is unique among them and breaks ties."""

    @property
    def order(self) -> int:
        """Return a unique number."""


R = TypeVar("R", bound=Ranked)


class Ladder(Generic[R]):
    """Things sorted by (key, order)."""

    def __init__(self) -> None:
        self._rungs: list[int] = []  # ascending
        self._rungs_of: dict[R, int] = {}
        self._things: dict[int, R] = {}  # by order

    def __len__(self) -> int:
        return len(self._rungs)

    def __contains__(self, thing: R) -> bool:
        return thing in self._rungs_of

    def put(self, thing: R, key: int | None) -> None:
        """Add the thing, or change its key; None: remove it if it is present."""
        if key is None:
            self.discard(thing)
            return
        rungs, order = self._rungs, thing.order
        rung = (key << ORDER_BITS) + order
        old = self._rungs_of.get(thing)
        if old == rung:
            return
        if old is not None:
            del rungs[bisect_left(rungs, old)]
            del self._things[old & ORDER_MASK]
        self._things[order] = thing
        self._rungs_of[thing] = rung
        insort(rungs, rung)

    def discard(self, thing: R) -> None:
        """Remove the thing if it is present."""
        old = self._rungs_of.pop(thing, None)
        if old is not None:
            rungs = self._rungs
            del rungs[bisect_left(rungs, old)]
            del self._things[old & ORDER_MASK]

    def refill(self, keys: Iterable[tuple[R, int]]) -> None:
        """Have these things instead, each with its key: one sort."""
        self._rungs_of = {thing: (key << ORDER_BITS) + thing.order for thing, key in keys}
        self._things = {thing.order: thing for thing in self._rungs_of}
        self._rungs = sorted(self._rungs_of.values())

    def upwards(self, floor: int | None = None) -> Iterator[R]:
        """Yield things from the least key (at least `floor`) up; do not change the ladder meanwhile."""
        rungs, things = self._rungs, self._things
        for position in range(0 if floor is None else bisect_left(rungs, floor << ORDER_BITS), len(rungs)):
            yield things[rungs[position] & ORDER_MASK]

    def downwards(self, key: int | None = None, floor: int | None = None) -> Iterator[R]:
        """Yield things from the greatest key (at most `key`) down to `floor`; do not change the ladder meanwhile."""
        rungs, things = self._rungs, self._things
        position = len(rungs) if key is None else bisect_left(rungs, (key + 1) << ORDER_BITS)
        while position:
            position -= 1
            rung = rungs[position]
            if floor is not None and rung < floor << ORDER_BITS:
                return
            yield things[rung & ORDER_MASK]
