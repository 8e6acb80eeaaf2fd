"""Bins in the order of a key, so that "the roomiest", "the latest" and "the largest that fits" cost O(log N).

Owns the order alone.  A ladder is a sorted list: at ten thousand entries, moving the tail by memmove costs less than
the pointer chasing of a tree in Python.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """What a ladder holds: `order` is unique among its entries and breaks ties."""

    @property
    def order(self) -> int:
        """Unique."""


R = TypeVar("R", bound=Ranked)


class Ladder(Generic[R]):
    """Sorted (key, order, thing)."""

    __slots__ = ("_keys", "_rungs")

    def __init__(self) -> None:
        self._rungs: list[tuple[int, int, R]] = []
        self._keys: dict[R, tuple[int, int, R]] = {}

    def __len__(self) -> int:
        return len(self._rungs)

    def __contains__(self, thing: R) -> bool:
        return thing in self._keys

    def put(self, thing: R, key: int) -> None:
        """Enter the thing, or change its key."""
        old = self._keys.get(thing)
        if old is not None:
            if old[0] == key:
                return
            rungs = self._rungs
            del rungs[bisect_left(rungs, old)]
        entry = (key, thing.order, thing)
        self._keys[thing] = entry
        insort(self._rungs, entry)

    def discard(self, thing: R) -> None:
        """Take the thing out, if it is in."""
        old = self._keys.pop(thing, None)
        if old is not None:
            rungs = self._rungs
            del rungs[bisect_left(rungs, old)]

    def last(self) -> R | None:
        """The thing with the greatest key."""
        return self._rungs[-1][2] if self._rungs else None

    def first(self) -> R | None:
        """The thing with the least key."""
        return self._rungs[0][2] if self._rungs else None

    def downwards(self, key: int | None = None, floor: int | None = None) -> Iterator[R]:
        """Things from the greatest key (at most `key`) down to `floor`.  The ladder must not change in between."""
        rungs = self._rungs
        position = len(rungs) if key is None else bisect_right(rungs, (key, 1 << 62))
        while position:
            position -= 1
            rung = rungs[position]
            if floor is not None and rung[0] < floor:
                return
            yield rung[2]

    def upwards(self, key: int) -> Iterator[R]:
        """Things from the least key that is at least `key` upwards.  The ladder must not change in between."""
        rungs = self._rungs
        for position in range(bisect_left(rungs, (key,)), len(rungs)):
            yield rungs[position][2]
