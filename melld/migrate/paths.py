"""The bins that a move draws from, their capacity in an epoch, and the moves that share bins.

Owns the names of the bins.  Never packs and never books.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from melld.ids import WorkerId
from melld.migrate.boundaries import Boundaries
from melld.migrate.packing import Bin
from melld.migrate.snapshot import Via

Item = TypeVar("Item")


def path(boundaries: Boundaries, source: WorkerId, destination: WorkerId) -> tuple[Bin, ...]:
    """Return the bins that a copy crosses, its link first."""
    shared = [("shared", segment.name) for segment in boundaries.segments_of(source, destination)]
    return (Via.KV, source, destination), ("out", source), ("in", destination), *shared


def compute(destination: WorkerId) -> tuple[Bin, ...]:
    """Return the bin of the destination's foreign prefill."""
    return ((Via.TOKENS, destination),)


def boundary(name: Bin, boundaries: Boundaries, batches: Mapping[WorkerId, int]) -> int:
    """Return the bin's capacity in an epoch; `batches`: decoding requests on each worker."""
    kind, first, *rest = name
    worker = WorkerId(first)
    match kind:
        case Via.KV:
            return boundaries.link_bytes(worker, WorkerId(rest[0]))
        case "out":
            return boundaries.out_bytes(worker)
        case "in":
            return boundaries.in_bytes(worker)
        case "shared":
            return boundaries.segment_bytes(first)
    return boundaries.prefill_tokens(worker, batches.get(worker, 0))


def together(items: Sequence[tuple[Item, Sequence[Bin]]]) -> list[list[Item]]:
    """Group the items that share bins, directly or through others; keep the order in and among the groups."""
    leader: dict[Bin, int] = {}
    lead = list(range(len(items)))

    def first_of(index: int) -> int:
        while lead[index] != index:
            lead[index] = index = lead[lead[index]]
        return index

    for index, (_, bins) in enumerate(items):
        for name in bins:
            one, other = sorted((first_of(index), first_of(leader.setdefault(name, index))))
            lead[other] = one
    groups: dict[int, list[Item]] = {}
    for index, (item, _) in enumerate(items):
        groups.setdefault(first_of(index), []).append(item)
    return list(groups.values())
