"""The fleet's ledger of KV blocks: which request holds how many blocks on which worker.

Owns the sums of the workers' block tables, as last reported.  Never counts text, never decides what fits, and does not
know who owns a request: during a migration a request holds blocks on two workers, and both count.

    free + used = total
    used <= held by its requests + reserved      (a shared block is used once, and held by each)
    held by its requests <= used + shared        (shared: blocks saved by sharing, reserved blocks included)
    held by any one request <= used

Blocks that only vLLM's prefix cache holds are free: vLLM evicts them when a request needs them.

Reports are applied in the order of the calls: the caller has put them in order (`engine.fleet.reports`).
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from melld.ids import RequestId, WorkerId
from melld.kvstore.geometry import KvGeometry

BlockFacts = tuple[int, str]
"""Blocks and phase of one request, as its worker sees them."""


class Holding(msgspec.Struct, frozen=True, gc=False):
    """Blocks that one request holds on one worker."""

    request: RequestId
    blocks: int
    kv_bytes: int
    phase: str


class WorkerBlocks(msgspec.Struct):
    """Holdings, reservations and sums of one worker.  `used_blocks` counts a shared block once."""

    worker: WorkerId
    geometry: KvGeometry
    total_blocks: int
    used_blocks: int = 0
    shared_blocks: int = 0
    holdings: dict[RequestId, Holding] = {}
    reserved: dict[RequestId, int] = {}
    released_blocks: int = 0
    """Reservations released since the worker's last report; they may still be counted in `used_blocks`."""

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of all the blocks."""
        return self.geometry.bytes_for_blocks(self.total_blocks)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the blocks in use."""
        return self.geometry.bytes_for_blocks(self.used_blocks)

    @property
    def reserved_blocks(self) -> int:
        """Return how many blocks are reserved for requests on their way here."""
        return sum(self.reserved.values())


class Ledger:
    """The fleet's KV blocks.  The methods of the first half change them; those of the second half only read."""

    def __init__(self) -> None:
        self._pages: dict[WorkerId, WorkerBlocks] = {}
        self._grown: dict[tuple[RequestId, WorkerId], int] = {}
        self._emptied: list[tuple[RequestId, WorkerId]] = []

    def open_worker(self, worker: WorkerId, geometry: KvGeometry, total_blocks: int) -> None:
        """Open an empty page for a started worker; drop the page of an earlier process of that name."""
        self.close_worker(worker)
        self._pages[worker] = WorkerBlocks(worker, geometry, total_blocks)

    def close_worker(self, worker: WorkerId) -> None:
        """Drop the page of a worker that has ended, and what its requests held there."""
        if (page := self._pages.pop(worker, None)) is not None:
            for request in page.holdings:
                self._grown.pop((request, worker), None)

    def blocks_changed(
        self,
        worker: WorkerId,
        blocks: tuple[int, int, int],
        changed: Mapping[RequestId, BlockFacts],
        gone: Iterable[RequestId] = (),
    ) -> None:
        """Apply a worker's report: its (used, total, shared) blocks, the requests that changed, and those that left.

        A report names a request as changed or as gone, not as both.  A report of a worker that is not open is ignored.
        """
        page = self._pages.get(worker)
        if page is None:
            return
        for request, facts in changed.items():
            self._set_holding(page, request, facts)
        for request in gone:
            if page.holdings.pop(request, None) is not None:
                self._grown.pop((request, worker), None)
        page.released_blocks = 0
        page.used_blocks, page.total_blocks, page.shared_blocks = blocks

    def reserve(self, worker: WorkerId, request: RequestId, blocks: int) -> None:
        """Reserve up to `blocks` on the worker for a migration, outside of the block tables that the worker reports.

        The reservation lasts until `release` or the worker's end; a second call for the request replaces the first.
        """
        if (page := self._pages.get(worker)) is not None:
            page.reserved[request] = blocks

    def release(self, worker: WorkerId, request: RequestId) -> None:
        """Drop a migration's reservation: its blocks are in a block table or free.  Unknown requests are ignored."""
        if (page := self._pages.get(worker)) is not None:
            page.released_blocks += page.reserved.pop(request, 0)

    def take_grown(self) -> dict[tuple[RequestId, WorkerId], int]:
        """Return the kv_bytes of every holding that has grown since the last call."""
        grown, self._grown = self._grown, {}
        return grown

    def take_emptied(self) -> list[tuple[RequestId, WorkerId]]:
        """Return the holdings that lost all their blocks since the last call but remain: vLLM preempted them."""
        emptied, self._emptied = self._emptied, []
        return emptied

    def _set_holding(self, page: WorkerBlocks, request: RequestId, facts: BlockFacts) -> None:
        worker, held, (blocks, phase) = page.worker, page.holdings.get(request), facts
        kv_bytes = page.geometry.bytes_for_blocks(blocks)
        page.holdings[request] = Holding(request, blocks, kv_bytes, phase)
        if held is None or blocks > held.blocks or (request, worker) in self._grown:
            self._grown[request, worker] = kv_bytes
        if held is not None and held.blocks and not blocks:
            self._emptied.append((request, worker))

    # -- reading ------------------------------------------------------------------------------------------------------

    def worker(self, worker: WorkerId) -> WorkerBlocks | None:
        """Return one worker's page, or None if it is not open."""
        return self._pages.get(worker)

    def holding(self, request: RequestId, worker: WorkerId) -> Holding | None:
        """Return what the request holds on the worker, or None."""
        page = self._pages.get(worker)
        return page.holdings.get(request) if page is not None else None

    def holdings_on(self, worker: WorkerId) -> list[Holding]:
        """Return all holdings on the worker."""
        page = self._pages.get(worker)
        return list(page.holdings.values()) if page is not None else []

    def shared_bytes(self, worker: WorkerId, counts: Callable[[RequestId], bool]) -> int:
        """Return a lower bound of the bytes that sharing saves among the requests for which `counts` is true.

        How much the other requests share is unknown, so all their blocks are subtracted.
        """
        page = self._pages.get(worker)
        if page is None or not page.shared_blocks:
            return 0
        others_blocks = sum(held.blocks for held in page.holdings.values() if not counts(held.request))
        return page.geometry.bytes_for_blocks(max(page.shared_blocks - others_blocks, 0))
