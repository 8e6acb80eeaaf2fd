"""One worker's page of the ledger: what is held there by its last report, and the laws that the sums obey.

Owns the shapes.  Knows nothing of other workers, and of requests only what they hold here.  `ledger` owns the pages.

    free + used = total
    used <= held by its requests + reserved      (a shared block is used once, and held by each)
    held by its requests <= used + shared        (shared: blocks saved by sharing, reserved blocks included)
    held by any one request <= used
"""

import msgspec

from melld.ids import RequestId, WorkerId
from melld.kvstore.geometry import KvGeometry


class Holding(msgspec.Struct, frozen=True, gc=False):
    """Blocks that one request holds on one worker."""

    request: RequestId
    worker: WorkerId
    blocks: int
    kv_bytes: int
    computed_tokens: int
    prompt_tokens: int
    output_tokens: int
    phase: str


class WorkerBlocks(msgspec.Struct, frozen=True, gc=False):
    """A worker's sums.  `used_blocks` counts a shared block once; `free_blocks` includes those only cached."""

    worker: WorkerId
    geometry: KvGeometry
    total_blocks: int
    used_blocks: int
    reserved_blocks: int
    requests: int

    @property
    def free_blocks(self) -> int:
        """Return how many blocks a request can take now."""
        return self.total_blocks - self.used_blocks

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of all the blocks."""
        return self.geometry.bytes_for_blocks(self.total_blocks)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the blocks in use."""
        return self.geometry.bytes_for_blocks(self.used_blocks)

    @property
    def free_bytes(self) -> int:
        """Return the bytes of the blocks that a request can take now."""
        return self.geometry.bytes_for_blocks(self.free_blocks)


class Page:
    """Holdings, reservations and sums of one worker."""

    def __init__(self, worker: WorkerId, geometry: KvGeometry, total_blocks: int) -> None:
        self.worker = worker
        self.geometry = geometry
        self.total_blocks = total_blocks
        self.used_blocks = 0
        self.shared_blocks = 0
        self.holdings: dict[RequestId, Holding] = {}
        self.reserved: dict[RequestId, int] = {}
        self.released_blocks = 0
        """Reservations released since the worker's last report; they may still be counted in `used_blocks`."""

    def sums(self) -> WorkerBlocks:
        """Return the page's totals."""
        return WorkerBlocks(
            worker=self.worker,
            geometry=self.geometry,
            total_blocks=self.total_blocks,
            used_blocks=self.used_blocks,
            reserved_blocks=sum(self.reserved.values()),
            requests=len(self.holdings),
        )

    def broken_laws(self) -> list[str]:
        """Return a line for each law at the top of this file that does not hold."""
        held_blocks = sum(held.blocks for held in self.holdings.values())
        largest = max((held.blocks for held in self.holdings.values()), default=0)
        worker, used, total, reserved = self.worker, self.used_blocks, self.total_blocks, sum(self.reserved.values())
        faults = []
        if not 0 <= used <= total:
            faults.append(f"{worker}: {used} blocks used of {total}")
        if used > held_blocks + reserved + self.released_blocks:
            faults.append(f"{worker}: {used} blocks used, but {held_blocks} held and {reserved} reserved")
        if held_blocks > used + self.shared_blocks:
            faults.append(f"{worker}: {held_blocks} blocks held, but {used} used and {self.shared_blocks} shared")
        if largest > used:
            faults.append(f"{worker}: one request holds {largest} blocks where {used} are used")
        faults += [
            f"{worker}: {held.request} has {held.blocks} blocks, but {held.kv_bytes} bytes"
            for held in self.holdings.values()
            if held.kv_bytes != self.geometry.bytes_for_blocks(held.blocks)
        ]
        return faults
