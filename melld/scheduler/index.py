"""Sorted indexes: of anything by a key, and of active workers by room ("tightest that fits", "roomiest"), in O(log N).

Own the order, and which workers are in it; never decide.  A ladder is a sorted list: at ten thousand entries, moving
its tail by memmove is cheaper than a tree in Python.  Each entry is one number, the key above the order: numbers
compare faster than tuples.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from melld.ids import WorkerId
from melld.scheduler.state import Worker

FEWER_CHANGES = 3  # above 1/3 changed, sorting all is cheaper
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
        order = thing.order
        rung = (key << ORDER_BITS) + order
        if self._rungs_of.get(thing) == rung:
            return
        self.discard(thing)
        self._things[order] = thing
        self._rungs_of[thing] = rung
        insort(self._rungs, rung)

    def discard(self, thing: R) -> None:
        """Remove the thing if it is present."""
        old = self._rungs_of.pop(thing, None)
        if old is not None:
            rungs = self._rungs
            del rungs[bisect_left(rungs, old)]
            del self._things[old & ORDER_MASK]

    def refill(self, keys: Iterable[tuple[R, int]]) -> None:
        """Replace the contents by these things and their keys, in one sort."""
        self._rungs_of = {thing: (key << ORDER_BITS) + thing.order for thing, key in keys}
        self._things = {thing.order: thing for thing in self._rungs_of}
        self._rungs = sorted(self._rungs_of.values())

    def upwards(self, floor: int | None = None) -> Iterator[R]:
        """Yield things by ascending key (at least `floor`); do not change the ladder while iterating."""
        rungs, things = self._rungs, self._things
        for position in range(0 if floor is None else bisect_left(rungs, floor << ORDER_BITS), len(rungs)):
            yield things[rungs[position] & ORDER_MASK]

    def downwards(self, key: int | None = None, floor: int | None = None) -> Iterator[R]:
        """Yield things by descending key (at most `key`) down to `floor`; do not change the ladder while iterating."""
        rungs, things = self._rungs, self._things
        position = len(rungs) if key is None else bisect_left(rungs, (key + 1) << ORDER_BITS)
        while position:
            position -= 1
            rung = rungs[position]
            if floor is not None and rung < floor << ORDER_BITS:
                return
            yield things[rung & ORDER_MASK]


class RoomIndex:
    """The active workers with a free slot, by (room_bytes, order).

    `noted`: workers whose room, slots or state may have changed; the code that changes them adds them.  Changes are
    applied together at the next query: a whole epoch of growth costs one sort.
    """

    def __init__(self, active: Mapping[WorkerId, Worker], room_bytes: Callable[[Worker], int]) -> None:
        self.noted: dict[WorkerId, Worker] = {}
        self._active = active
        self._room_bytes = room_bytes
        self._ladder: Ladder[Worker] = Ladder()
        self._stale = False

    def note(self, worker: Worker) -> None:
        """Mark the worker: its room, slots or state may have changed."""
        self.noted[worker.id] = worker

    def note_all(self) -> None:
        """Mark all workers: their room may have changed."""
        self._stale = True

    def tightest(self, room_bytes: int) -> Iterator[Worker]:
        """Yield workers with at least that much room, tightest first; do not change the index while iterating."""
        self._settle()
        return self._ladder.upwards(room_bytes)

    def roomiest(self) -> Iterator[Worker]:
        """Yield workers with a free slot, roomiest first; do not change the index while iterating."""
        self._settle()
        return self._ladder.downwards()

    def _settle(self) -> None:
        noted, ladder, room_bytes = self.noted, self._ladder, self._room_bytes
        if self._stale or len(noted) * FEWER_CHANGES > len(ladder):
            ladder.refill((one, room_bytes(one)) for one in self._active.values() if one.count < one.slots)
            self._stale = False
        else:
            for worker in noted.values():
                is_open = worker.count < worker.slots and worker.id in self._active
                ladder.put(worker, room_bytes(worker) if is_open else None)
        noted.clear()
