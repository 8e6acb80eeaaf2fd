"""Sorted index of active workers by room: "tightest that fits" and "roomiest" in O(log N).

Owns which workers are in the order; never decides.  Leaves out workers without a free slot.  Changes are noted and
applied together at the next query: a whole epoch of growth costs one sort.
"""

from collections.abc import Callable, Iterator, Mapping

from melld.ids import WorkerId
from melld.scheduler.ladder import Ladder
from melld.scheduler.state import Worker

FEWER_CHANGES = 3  # above 1/3 changed, sorting all is cheaper


class RoomIndex:
    """The active workers with a free slot, by (room_bytes, order).

    `noted`: workers whose room, slots or state may have changed; the code that changes them adds them.
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
        """Return workers with at least that room, the tightest first; do not change the index meanwhile."""
        self._settle()
        return self._ladder.upwards(room_bytes)

    def roomiest(self) -> Iterator[Worker]:
        """Return workers with a free slot, the roomiest first; do not change the index meanwhile."""
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
