"""Sorted index of active workers by room: "tightest that fits" and "roomiest" in O(log N).

Owns the order; never decides.  Leaves out workers without a free slot.  Changes are noted and applied together at the
next query: a whole epoch of growth costs one sort.

A worker's key is one number, its room above its order of activation: numbers compare faster than tuples.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping

from melld.ids import WorkerId
from melld.scheduler.state import Worker

ORDER_BITS = 32
ORDER_MASK = (1 << ORDER_BITS) - 1
FEWER_CHANGES = 3  # above 1/3 changed, sorting all is cheaper


class RoomIndex:
    """The active workers with a free slot, by (room_bytes, order).

    `noted`: workers whose room, slots or state may have changed; the code that changes them adds them.
    """

    def __init__(self, active: Mapping[WorkerId, Worker], room_bytes: Callable[[Worker], int]) -> None:
        self.noted: dict[WorkerId, Worker] = {}
        self._active = active
        self._room_bytes = room_bytes
        self._keys: list[int] = []  # ascending
        self._workers: dict[int, Worker] = {}  # by order
        self._stale = False

    def note(self, worker: Worker) -> None:
        """Mark the worker: its room, slots or state may have changed."""
        self.noted[worker.id] = worker

    def note_all(self) -> None:
        """Mark all workers: their room may have changed."""
        self._stale = True

    def tightest(self, room_bytes: int) -> Iterator[Worker]:
        """Yield workers with at least that room, the tightest first; do not change the index meanwhile."""
        if self.noted or self._stale:
            self._settle()
        keys, workers = self._keys, self._workers
        for position in range(bisect_left(keys, room_bytes << ORDER_BITS), len(keys)):
            yield workers[keys[position] & ORDER_MASK]

    def roomiest(self) -> Iterator[Worker]:
        """Yield workers with a free slot, the roomiest first; do not change the index meanwhile."""
        if self.noted or self._stale:
            self._settle()
        workers = self._workers
        for key in reversed(self._keys):
            yield workers[key & ORDER_MASK]

    def _settle(self) -> None:
        noted, keys = self.noted, self._keys
        if self._stale or len(noted) * FEWER_CHANGES > len(keys):
            self._sort()
            return
        enter, workers = self._enter, self._workers
        for worker in noted.values():
            if (key := worker.key) is not None:
                del keys[bisect_left(keys, key)]
                del workers[key & ORDER_MASK]
            if (key := enter(worker)) is not None:
                insort(keys, key)
        noted.clear()

    def _sort(self) -> None:
        for worker in self._workers.values():
            worker.key = None
        self._workers = {}
        enter = self._enter
        self._keys = sorted([key for worker in self._active.values() if (key := enter(worker)) is not None])
        self._stale = False
        self.noted.clear()

    def _enter(self, worker: Worker) -> int | None:
        """Set and return the worker's key; None if it has no place in the order."""
        key = None
        if worker.count < worker.slots and worker.id in self._active:
            order, room_bytes = worker.order, self._room_bytes  # a local: a direct call would be looked up as a method
            key = (room_bytes(worker) << ORDER_BITS) + order
            self._workers[order] = worker
        worker.key = key
        return key
