"""Boundaries: what a link may carry, and a worker may prefill for moves, in an epoch without slowing what runs there.

Owns the figures and how to read them.  Never measures (`melld profile` does) and never plans (`planner` does).

    link      bytes per epoch, by source and destination
    port      bytes per epoch that leave one worker for all others together, or enter it
    segment   bytes per epoch over what several pairs share: a switch, a host bridge, the host's memory
    prefill   tokens of foreign prefill per epoch, by worker and by the number of requests decoding there

A copy crosses its link, the port out of its source, the port into its destination and every segment on its path.
"""

import itertools
from collections.abc import Mapping

import msgspec

from melld.ids import WorkerId

PrefillTable = tuple[tuple[int, int], ...]
"""Rows (decoding requests, tokens per epoch), by ascending requests; the first row is for none."""
Pair = tuple[WorkerId, WorkerId]
"""Source and destination."""

DEFAULT_EPOCH_S = 0.1
DEFAULT_LINK_BYTES = 512 << 20
DEFAULT_PREFILL: PrefillTable = ((0, 2048), (1, 512))


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A resource that these pairs share, and the bytes per epoch of all of them together."""

    name: str
    nbytes: int
    pairs: frozenset[Pair]


class Boundaries(msgspec.Struct, frozen=True, kw_only=True):
    """All boundaries, for epochs of `epoch_s`.  Defaults for what has not been measured are generous.

    `links`: source -> destination -> bytes.  `ports_out`, `ports_in`: worker -> bytes.  `prefill`: worker -> table.
    The fields `other_...` apply to links, ports and workers that are not named.
    """

    epoch_s: float = DEFAULT_EPOCH_S
    links: Mapping[WorkerId, Mapping[WorkerId, int]] = {}
    ports_out: Mapping[WorkerId, int] = {}
    ports_in: Mapping[WorkerId, int] = {}
    segments: tuple[Segment, ...] = ()
    prefill: Mapping[WorkerId, PrefillTable] = {}
    other_link_bytes: int = DEFAULT_LINK_BYTES
    other_port_bytes: int = DEFAULT_LINK_BYTES
    other_prefill: PrefillTable = DEFAULT_PREFILL

    def __post_init__(self) -> None:
        for table in (*self.prefill.values(), self.other_prefill):
            if not table or list(table) != sorted(table) or table[0][0] != 0:
                raise ValueError(f"a table of prefill boundaries begins with batch 0 and ascends: {table}")

    def link_bytes(self, source: WorkerId, destination: WorkerId) -> int:
        """Return the bytes per epoch over a link; at least one, so that every move ends."""
        return max(self.links.get(source, {}).get(destination, self.other_link_bytes), 1)

    def out_bytes(self, worker: WorkerId) -> int:
        """Return the bytes per epoch that may leave the worker; at least one.  Defaults to its fastest link."""
        fastest = max(self.links.get(worker, {}).values(), default=0)
        return max(self.ports_out.get(worker, fastest or self.other_port_bytes), 1)

    def in_bytes(self, worker: WorkerId) -> int:
        """Return the bytes per epoch that may enter the worker; at least one.  Defaults to its fastest link."""
        fastest = max((row[worker] for row in self.links.values() if worker in row), default=0)
        return max(self.ports_in.get(worker, fastest or self.other_port_bytes), 1)

    def segments_of(self, source: WorkerId, destination: WorkerId) -> list[Segment]:
        """Return the segments that a copy crosses beside its link and its ports."""
        pair = source, destination
        return [segment for segment in self.segments if pair in segment.pairs]

    def segment_bytes(self, name: str) -> int:
        """Return the bytes per epoch over the segment; at least one."""
        return max(next((segment.nbytes for segment in self.segments if segment.name == name), 1), 1)

    def prefill_tokens(self, worker: WorkerId, batch: int) -> int:
        """Return the tokens per epoch beside `batch` decoding requests, interpolated in the table; at least one."""
        table = self.prefill.get(worker, self.other_prefill)
        for (fewer, first), (more, last) in itertools.pairwise(table):
            if fewer <= batch < more:
                if fewer == 0 < batch:  # the idle figure says nothing about a busy worker
                    return max(last, 1)
                return max(first + (last - first) * (batch - fewer) // (more - fewer), 1)
        return max(table[-1][1], 1)

    def for_epochs_of(self, epoch_s: float) -> "Boundaries":
        """Return the same rates for another length of the epoch."""
        factor = epoch_s / self.epoch_s
        return Boundaries(
            epoch_s=epoch_s,
            links={source: _scaled_counts(row, factor) for source, row in self.links.items()},
            ports_out=_scaled_counts(self.ports_out, factor),
            ports_in=_scaled_counts(self.ports_in, factor),
            segments=tuple(msgspec.structs.replace(one, nbytes=int(one.nbytes * factor)) for one in self.segments),
            prefill={worker: _scaled(table, factor) for worker, table in self.prefill.items()},
            other_link_bytes=int(self.other_link_bytes * factor),
            other_port_bytes=int(self.other_port_bytes * factor),
            other_prefill=_scaled(self.other_prefill, factor),
        )


def _scaled(table: PrefillTable, factor: float) -> PrefillTable:
    return tuple((batch, int(tokens * factor)) for batch, tokens in table)


def _scaled_counts(counts: Mapping[WorkerId, int], factor: float) -> dict[WorkerId, int]:
    return {worker: int(count * factor) for worker, count in counts.items()}
