"""What a link may carry, and a worker may prefill for others, in one epoch without disturbing what runs there.

Owns the figures and how to read them.  Never measures (`melld profile` does) and never divides (`planner` does).

    link      bytes per epoch, by source and destination
    prefill   tokens of foreign prefill per epoch, by worker and by the number of requests that it decodes meanwhile
"""

import itertools
from collections.abc import Mapping

import msgspec

from melld.ids import WorkerId

PrefillTable = tuple[tuple[int, int], ...]
"""(requests that decode meanwhile, tokens per epoch), by ascending requests; the first line is for none."""

DEFAULT_EPOCH_S = 0.1
DEFAULT_LINK_BYTES = 512 << 20
DEFAULT_PREFILL: PrefillTable = ((0, 2048), (1, 512))


class Boundaries(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, for epochs of `epoch_s`.  What has not been measured is taken to be generous.

    `links`: source -> destination -> bytes.  `prefill`: worker -> table.  `other_link_bytes` and `other_prefill` hold
    for links and workers that are not named.
    """

    epoch_s: float = DEFAULT_EPOCH_S
    links: Mapping[WorkerId, Mapping[WorkerId, int]] = {}
    prefill: Mapping[WorkerId, PrefillTable] = {}
    other_link_bytes: int = DEFAULT_LINK_BYTES
    other_prefill: PrefillTable = DEFAULT_PREFILL

    def __post_init__(self) -> None:
        for table in (*self.prefill.values(), self.other_prefill):
            if not table or list(table) != sorted(table) or table[0][0] != 0:
                raise ValueError(f"a table of prefill boundaries begins with batch 0 and ascends: {table}")

    def link_bytes(self, source: WorkerId, destination: WorkerId) -> int:
        """Bytes per epoch from there to there; at least one, so that every move ends some time."""
        return max(self.links.get(source, {}).get(destination, self.other_link_bytes), 1)

    def prefill_tokens(self, worker: WorkerId, batch: int) -> int:
        """Tokens per epoch beside so many decoding requests: the line between the table's points; at least one."""
        table = self.prefill.get(worker, self.other_prefill)
        for (fewer, first), (more, last) in itertools.pairwise(table):
            if fewer <= batch < more:
                if fewer == 0 < batch:  # a worker with nobody to disturb says nothing about one that has somebody
                    return max(last, 1)
                return max(first + (last - first) * (batch - fewer) // (more - fewer), 1)
        return max(table[-1][1], 1)

    def for_epochs_of(self, epoch_s: float) -> "Boundaries":
        """The same rates, told for another length of the epoch."""
        factor = epoch_s / self.epoch_s
        return Boundaries(
            epoch_s=epoch_s,
            links={
                source: {destination: int(count * factor) for destination, count in row.items()}
                for source, row in self.links.items()
            },
            prefill={worker: _scaled(table, factor) for worker, table in self.prefill.items()},
            other_link_bytes=int(self.other_link_bytes * factor),
            other_prefill=_scaled(self.other_prefill, factor),
        )


def _scaled(table: PrefillTable, factor: float) -> PrefillTable:
    return tuple((batch, int(tokens * factor)) for batch, tokens in table)
