"""Boundaries: what a link may carry, and a worker may prefill for moves, in an epoch without slowing what runs there.

Owns the figures and how they follow from what links and workers were seen to do.  Never plans (`planner` does).

    link      bytes per epoch, by source and destination: the rate of the copies with which the link was tried
    port      bytes per epoch that leave one worker for all others together, or enter it: those of its fastest link
    segment   bytes per epoch over what several pairs share: a switch, a host bridge, the host's memory
    prefill   tokens of foreign prefill per epoch, by worker: all that it computes in this time, and beside requests
              that decode so many that a step takes a `share` longer

A copy crosses its link, the port out of its source, the port into its destination and every segment on its path.
"""

from collections.abc import Mapping

import msgspec

from melld.ids import WorkerId
from melld.scheduler.steptimes import StepCosts

Pair = tuple[WorkerId, WorkerId]
"""Source and destination."""


class Prefill(msgspec.Struct, frozen=True):
    """Tokens of foreign prefill per epoch: on an idle worker, and next to decoding requests."""

    idle: int
    beside: int


DEFAULT_LINK_BYTES_S = 5 << 30
DEFAULT_PREFILL_S = Prefill(20_480, 5_120)
"""Of a second; generous."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A resource that these pairs share.  `nbytes`: per epoch, of all together; None: as many as their fastest link."""

    name: str
    pairs: frozenset[Pair]
    nbytes: int | None = None


class Boundaries(msgspec.Struct, frozen=True, kw_only=True):
    """All boundaries, for epochs of `epoch_s`.

    `links`: source -> destination -> bytes.  The fields `other_...` apply to links, ports and workers that are not
    named.  `share`: by how much longer, as a fraction, a step may become.  `most_link_bytes`: the operator's limit.
    """

    epoch_s: float = 0.1
    links: Mapping[WorkerId, Mapping[WorkerId, int]] = {}
    segments: tuple[Segment, ...] = ()
    prefill: Mapping[WorkerId, Prefill] = {}
    other_link_bytes: int = int(0.1 * DEFAULT_LINK_BYTES_S)
    other_port_bytes: int = int(0.1 * DEFAULT_LINK_BYTES_S)
    other_prefill: Prefill = Prefill(2_048, 512)
    share: float = 0.1
    most_link_bytes: int | None = None

    @classmethod
    def assumed(
        cls, epoch_s: float, share: float, most_bytes_per_s: float | None, segments: tuple[Segment, ...]
    ) -> "Boundaries":
        """Return the boundaries before any measurement."""
        idle, beside = (int(tokens * epoch_s) for tokens in msgspec.structs.astuple(DEFAULT_PREFILL_S))
        most_link_bytes = None if most_bytes_per_s is None else int(most_bytes_per_s * epoch_s)
        link_bytes = int(min(DEFAULT_LINK_BYTES_S, most_bytes_per_s or DEFAULT_LINK_BYTES_S) * epoch_s)
        return cls(
            epoch_s=epoch_s,
            segments=segments,
            other_link_bytes=link_bytes,
            other_port_bytes=link_bytes,
            other_prefill=Prefill(idle, beside),
            share=share,
            most_link_bytes=most_link_bytes,
        )

    def learned(
        self, rates: Mapping[Pair, float], costs: Mapping[WorkerId, StepCosts], segments: tuple[Segment, ...] = ()
    ) -> "Boundaries":
        """Return the boundaries with these links, in bytes per second, and workers' costs; and `segments` besides."""
        links: dict[WorkerId, dict[WorkerId, int]] = {}
        for (source, destination), bytes_per_s in rates.items():
            nbytes = int(bytes_per_s * self.epoch_s)
            links.setdefault(source, {})[destination] = min(nbytes, self.most_link_bytes or nbytes)
        known = {worker: cost.prompt_token_s for worker, cost in costs.items() if cost.prompt_token_s}
        return msgspec.structs.replace(
            self,
            links=links,
            prefill={worker: self._prefill_of(token_s) for worker, token_s in known.items()},
            segments=(*self.segments, *segments),
        )

    def _prefill_of(self, token_s: float) -> Prefill:
        """Return what a worker that computes a prompt's token in `token_s` may prefill."""
        tokens = self.epoch_s / token_s
        return Prefill(int(tokens), int(tokens * self.share / (1.0 + self.share)))

    def link_bytes(self, source: WorkerId, destination: WorkerId) -> int:
        """Return the bytes per epoch over a link; at least one, so that every move ends."""
        return max(self.links.get(source, {}).get(destination, self.other_link_bytes), 1)

    def out_bytes(self, worker: WorkerId) -> int:
        """Return the bytes per epoch that may leave the worker; at least one."""
        return max(max(self.links.get(worker, {}).values(), default=self.other_port_bytes), 1)

    def in_bytes(self, worker: WorkerId) -> int:
        """Return the bytes per epoch that may enter the worker; at least one."""
        entering = (row[worker] for row in self.links.values() if worker in row)
        return max(max(entering, default=self.other_port_bytes), 1)

    def segments_of(self, source: WorkerId, destination: WorkerId) -> list[Segment]:
        """Return the segments that a copy crosses besides its link and its ports."""
        pair = source, destination
        return [segment for segment in self.segments if pair in segment.pairs]

    def segment_bytes(self, name: str) -> int:
        """Return the bytes per epoch over the segment; at least one."""
        segment = next((one for one in self.segments if one.name == name), None)
        if segment is None:
            return 1
        if segment.nbytes is not None:
            return max(segment.nbytes, 1)
        return max(self.link_bytes(*pair) for pair in segment.pairs)

    def prefill_tokens(self, worker: WorkerId, batch: int) -> int:
        """Return the tokens per epoch next to `batch` decoding requests; at least one."""
        tokens = self.prefill.get(worker, self.other_prefill)
        return max(tokens.beside if batch else tokens.idle, 1)

    def in_words(self) -> str:
        """Return the measurements so far as one line, for `melld status`."""
        rates = [nbytes / self.epoch_s / 2**30 for row in self.links.values() for nbytes in row.values()]
        parts = [f"links {min(rates):.2f} to {max(rates):.2f} GiB/s"] if rates else []
        if self.prefill:
            idle, beside = (min(getattr(one, name) for one in self.prefill.values()) for name in ("idle", "beside"))
            per_epoch = f"{self.epoch_s * 1e3:g} ms"
            parts.append(f"prefill for moves in {per_epoch}: {idle:,} tokens idle, {beside:,} beside a request")
        return "; ".join(parts) or "defaults: nothing was seen yet"
