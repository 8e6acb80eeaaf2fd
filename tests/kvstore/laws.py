"""The laws that the sums of the fleet's ledger obey (`melld.kvstore.ledger`)."""

from collections.abc import Iterator

from melld.ids import RequestId
from melld.kvstore.ledger import Holding, Ledger, WorkerBlocks


def check_ledger(ledger: Ledger) -> None:
    """Check every law; the error names all that are broken."""
    faults = [fault for page in pages(ledger) for fault in _broken(page)]
    assert not faults, "; ".join(faults)


def pages(ledger: Ledger) -> list[WorkerBlocks]:
    """Return the pages of all open workers."""
    return list(ledger._pages.values())


def holdings_of(ledger: Ledger, request: RequestId) -> list[Holding]:
    """Return what the request holds on all workers: two rows during a migration."""
    return [page.holdings[request] for page in pages(ledger) if request in page.holdings]


def kv_bytes(ledger: Ledger, request: RequestId) -> int:
    """Return the bytes of the request's blocks on all workers."""
    return sum(held.kv_bytes for held in holdings_of(ledger, request))


def _broken(page: WorkerBlocks) -> Iterator[str]:
    held_blocks = sum(held.blocks for held in page.holdings.values())
    largest = max((held.blocks for held in page.holdings.values()), default=0)
    worker, used, total, reserved = page.worker, page.used_blocks, page.total_blocks, page.reserved_blocks
    if not 0 <= used <= total:
        yield f"{worker}: {used} blocks used of {total}"
    if used > held_blocks + reserved + page.released_blocks:
        yield f"{worker}: {used} blocks used, but {held_blocks} held and {reserved} reserved"
    if held_blocks > used + page.shared_blocks:
        yield f"{worker}: {held_blocks} blocks held, but {used} used and {page.shared_blocks} shared"
    if largest > used:
        yield f"{worker}: one request holds {largest} blocks where {used} are used"
    for held in page.holdings.values():
        if held.kv_bytes != page.geometry.bytes_for_blocks(held.blocks):
            yield f"{worker}: {held.request} has {held.blocks} blocks, but {held.kv_bytes} bytes"
