"""The ledger of one device's memory: whose weights it holds, and who may use which granule of its arena.

    granules 1 .. n = closed + free + sum of granted        no granule in two places
    open (free + granted) <= limit = ⌊(memory - resident) / granule⌋ - 1, or none is opened or granted

Granule 0 is nobody's, because block 0 is every engine's null block; its bytes are always there.  The limit falls as
soon as memory is promised to weights; then free granules are closed, and the rest as they come back (`debt`).
Never decides who gets anything.
"""

import heapq
from collections.abc import Iterable

from melld.ids import WorkerId

GRANULE_BLOCKS = 8
GRANULE_UNIT_BYTES = 2 * 2**20


def granule_bytes_for(block_bytes: Iterable[int]) -> int:
    """Return the granule of a device on which models with these blocks may run."""
    return -(-GRANULE_BLOCKS * max(block_bytes) // GRANULE_UNIT_BYTES) * GRANULE_UNIT_BYTES


def usable_bytes(granule_bytes: int, block_bytes: int) -> int:
    """Return the bytes of a granule guaranteed to hold whole blocks, wherever it starts."""
    return granule_bytes if granule_bytes % block_bytes == 0 else (granule_bytes // block_bytes - 1) * block_bytes


class GranuleLedger:
    """Memory of one device."""

    def __init__(self, memory_bytes: int, granule_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.granule_bytes = granule_bytes
        self.count = max(memory_bytes // granule_bytes - 1, 0)
        self._free = list(range(1, self.count + 1))  # a heap, as the closed ones are: low ids are used first
        self._closed: list[int] = []
        self._granted: dict[WorkerId, set[int]] = {}
        self._resident: dict[WorkerId, int] = {}
        self._resident_bytes = 0

    @property
    def limit(self) -> int:
        """Granules that may be open next to the weights that are on the device now or soon."""
        return max((self.memory_bytes - self._resident_bytes) // self.granule_bytes - 1, 0)

    @property
    def free(self) -> int:
        """Open granules that are not granted."""
        return len(self._free)

    @property
    def open(self) -> int:
        """Granules whose bytes are there for KV."""
        return self.count - len(self._closed)

    @property
    def debt(self) -> int:
        """Granules that must still be closed."""
        return max(self.open - self.limit, 0)

    def resident(self, worker: WorkerId) -> int:
        """Return the bytes promised to the worker's weights."""
        return self._resident.get(worker, 0)

    def has_room(self, worker: WorkerId, resident_bytes: int, kept: int) -> bool:
        """Return True if weights of this size leave `kept` granules for KV."""
        others_bytes = self._resident_bytes - self.resident(worker)
        return (self.memory_bytes - others_bytes - resident_bytes) // self.granule_bytes - 1 >= kept

    def granules(self, worker: WorkerId) -> tuple[int, ...]:
        """Return the granules that the worker may use."""
        return tuple(self._granted.get(worker, ()))

    def granted(self, worker: WorkerId) -> int:
        """Return how many they are."""
        return len(self._granted.get(worker, ()))

    def reside(self, worker: WorkerId, resident_bytes: int) -> None:
        """Promise memory for the worker's weights, or correct the promise; 0: it has left."""
        self._resident_bytes += resident_bytes - self._resident.pop(worker, 0)
        if resident_bytes:
            self._resident[worker] = resident_bytes
        self._balance()

    def grant(self, worker: WorkerId, count: int) -> tuple[int, ...]:
        """Grant `count` free granules to the worker; return them."""
        assert 0 <= count <= self.free, (worker, count)
        assert not self.debt, worker
        granules = tuple(heapq.heappop(self._free) for _ in range(count))
        self._granted.setdefault(worker, set()).update(granules)
        return granules

    def give_back(self, worker: WorkerId, granules: Iterable[int]) -> int:
        """Free those of these granules that the worker has; return how many.  Repeated answers count once."""
        held = self._granted.get(worker, set())
        returned = held.intersection(granules)
        held -= returned
        for granule in returned:
            heapq.heappush(self._free, granule)
        self._balance()
        return len(returned)

    def give_back_all(self, worker: WorkerId) -> None:
        """Free everything that the worker has."""
        self.give_back(worker, self.granules(worker))

    def _balance(self) -> None:
        """Close free granules beyond the limit, or open closed ones below it."""
        while self._free and self.debt:
            heapq.heappush(self._closed, heapq.heappop(self._free))
        while self._closed and self.open < self.limit:
            heapq.heappush(self._free, heapq.heappop(self._closed))
