"""The bins that a move draws from, and their capacity in an epoch.

Owns the names of the bins.  Never packs and never books.
"""

from collections.abc import Mapping

from melld.ids import WorkerId
from melld.migrate.boundaries import Boundaries
from melld.migrate.packing import Bin
from melld.migrate.snapshot import Via


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
