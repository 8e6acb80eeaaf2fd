"""Active workers in the order of their room, for "the tightest that fits" and "the roomiest" in O(log N).

Owns the order; never decides.  Workers whose slots are all taken are left out: nothing fits on them.
Changes are noted and paid for at the next question, all together: a whole epoch of growth costs one sort.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping

from melld.ids import WorkerId
from melld.scheduler.state import Worker

Entry = tuple[int, int, Worker]


class RoomIndex:
    """Sorted (room_bytes, order, worker) of the active workers with a free slot."""

    def __init__(self, active: Mapping[WorkerId, Worker], room_bytes: Callable[[Worker], int]) -> None:
        self._active = active
        self._room_bytes = room_bytes
        self._entries: list[Entry] = []
        self._changed: dict[WorkerId, Worker] = {}
        self._stale = False

    def note(self, worker: Worker) -> None:
        """The worker's room, slots or state may have changed."""
        self._changed[worker.id] = worker

    def note_all(self) -> None:
        """Every worker's room may have changed."""
        self._stale = True

    def tightest(self, room_bytes: int) -> Iterator[Worker]:
        """Workers with at least that room, the tightest first.  The index must not be changed in between."""
        self._settle()
        entries = self._entries
        for position in range(bisect_left(entries, (room_bytes,)), len(entries)):
            yield entries[position][2]

    def roomiest(self) -> Iterator[Worker]:
        """Workers with a free slot, the roomiest first.  The index must not be changed in between."""
        self._settle()
        for entry in reversed(self._entries):
            yield entry[2]

    def _settle(self) -> None:
        changed = self._changed
        if self._stale or len(changed) * 8 > len(self._entries):
            for entry in self._entries:
                entry[2].entry = None
            self._entries = sorted([self._enter(w) for w in self._active.values() if w.count < w.slots])
            self._stale = False
        else:
            for worker in changed.values():
                self._replace(worker)
        if changed:
            changed.clear()

    def _enter(self, worker: Worker) -> Entry:
        worker.entry = (self._room_bytes(worker), worker.order, worker)
        return worker.entry

    def _replace(self, worker: Worker) -> None:
        entries = self._entries
        if worker.entry is not None:
            del entries[bisect_left(entries, worker.entry)]
            worker.entry = None
        if worker.id in self._active and worker.count < worker.slots:
            insort(entries, self._enter(worker))
