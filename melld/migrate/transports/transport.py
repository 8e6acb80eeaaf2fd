"""The interface and shared parts of the transports that move KV blocks between workers.

Owns handles, pacing, the check of what has arrived, and the report of a copy.  Needs torch, not vLLM.

    exporter (source)                        puller (destination)
    export(region) ──► handle bytes ──────► open(handle) ──► Link.pull(source blocks, destination blocks)

The destination pulls; the source's process does nothing and keeps decoding.  Handles are plain bytes that name live
memory of a process on this machine: they are worthless once it has ended.  A pull releases the GIL while bytes move.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from melld.errors import MelldError
from melld.migrate.transports.layout import KvLayout, packed_layout, paired_views


class TransportFailed(MelldError):
    """This transport cannot open or copy the peer's memory.  No client hears of it."""

    def __init__(self, transport: str, why: str) -> None:
        super().__init__(f"{transport}: {why}")


class ChecksumMismatch(TransportFailed):
    """The copied bytes differ from the source's.  The blocks must not be used."""


class LinkBroken(TransportFailed):
    """The link is of no use any more, and was not closed."""


class PullCancelled(TransportFailed):
    """The pull was cancelled on request."""


class KvHandle(msgspec.Struct, frozen=True):
    """Address of a worker's KV memory for its peers.  Only the transport named `transport` reads `where`."""

    transport: str
    layout: KvLayout
    where: bytes


def handle_of(transport: str, layout: KvLayout, where: Any) -> bytes:
    """Return a handle as MessagePack."""
    return msgspec.msgpack.encode(KvHandle(transport, layout, msgspec.msgpack.encode(where)))


class Pulled(msgspec.Struct, frozen=True):
    """Report of one pull.  `copy_s`: time in which bytes moved; `paced_s`: time that the rate limit added."""

    blocks: int
    nbytes: int
    copy_s: float
    paced_s: float


Wait = Callable[[], None]
"""Block until a copy that was begun is complete."""


Begin = Callable[[Sequence[int], Sequence[int]], Wait]
"""Begins to copy these blocks of the peer into those of ours."""


def done() -> None:
    """Return at once: the wait for a copy that was complete when it had begun."""


class Link:
    """A direction between two workers: the peer's mapped region and ours (its bytes, uint8).  For one thread at a time.

    All that a transport needs is to open, to begin a copy, to do so into other memory of ours, and to close.
    """

    def __init__(self, source: KvLayout, region: torch.Tensor, destination: KvLayout) -> None:
        self.source = source
        self.region = region
        self.destination = destination

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """Begin to copy whole blocks.  Copies end in the order in which they began; keep the link until they have."""
        raise NotImplementedError

    def into(self, region: torch.Tensor, layout: KvLayout) -> "Link":
        """Return a link from the same memory into `region`, which works until this one is closed."""
        raise NotImplementedError

    def delivered(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> bool:
        """Return True if these blocks of ours have the bytes of the peer's, which are read a second time."""
        packed = packed_layout(self.destination, len(source_blocks))
        read = torch.empty(packed.region_bytes, dtype=torch.uint8, device=self.region.device)
        if read.is_cuda:
            torch.cuda.synchronize(read.device)  # the copy may run on another stream than what had this memory before
        link = self.into(read, packed)  # kept until the copy has ended: it reads the link's own buffers and tables
        link.begin(source_blocks, range(len(source_blocks)))()
        places = torch.tensor(destination_blocks, device=read.device)
        pairs = paired_views(self.region, self.destination, read, packed)
        return all(torch.equal(ours[:, places], theirs) for ours, theirs in pairs)

    def close(self) -> None:
        """Unmap the peer's memory."""


PIECES_IN_FLIGHT = 2
"""Pieces of a pull under way at once, so that the device does not idle while the host looks at the clock."""
PIECE_S = 0.02
"""Longest piece on a limited link: an urgent copy waits no longer than this."""


class Pacer:
    """Rate limiter: when the next piece may begin.  No rate, no wait."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def wait_s(self) -> float:
        """Return how long the time that is booked still lasts."""
        return max(self._free_at_s - time.monotonic(), 0.0)

    def book(self, nbytes: int) -> None:
        """Book the bytes' time, after what is booked."""
        if self._bytes_per_s:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + nbytes / self._bytes_per_s


class Puller:
    """Puller of blocks over one link: in pieces, paced, verified if asked."""

    def __init__(
        self, link: Link, *, bytes_per_s: float | None = None, checksum: bool = False, piece_bytes: int = 16 << 20
    ) -> None:
        self._link = link
        self._pacer = Pacer(bytes_per_s)
        self._checksum = checksum
        if bytes_per_s:
            piece_bytes = min(piece_bytes, int(bytes_per_s * PIECE_S))
        self._piece_blocks = max(1, piece_bytes // link.source.block_bytes)

    def pull(
        self,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        is_cancelled: Callable[[], bool] = lambda: False,
        *,
        paced: bool = True,
        bytes_per_s: float = 0.0,
    ) -> Pulled:
        """Copy `source_blocks[i]` of the peer into `destination_blocks[i]` of ours.

        `is_cancelled` is called before each piece, and every `PIECE_S` of a wait for the rate limit.  Not `paced`: the
        link's limit counts the pull but does not delay it.
        `bytes_per_s`: this pull's own limit; 0: none.

        Raises:
            TransportFailed: the ids are not blocks of the two regions, or the copy failed.
            ChecksumMismatch: the bytes that arrived differ from the source's.
            PullCancelled: `is_cancelled` returned true; some pieces may have been copied.
        """
        self._check(source_blocks, destination_blocks)
        flight, own = _Pieces(), Pacer(bytes_per_s)
        block_bytes, piece_blocks, paced_s = self._link.source.block_bytes, self._piece_blocks, 0.0
        if bytes_per_s:
            piece_blocks = max(1, min(piece_blocks, int(bytes_per_s * PIECE_S) // block_bytes))
        try:
            for source, destination in _pieces(source_blocks, destination_blocks, piece_blocks):
                paced_s += self._pace((own, self._pacer) if paced else (own,), is_cancelled)
                for pacer in (own, self._pacer):
                    pacer.book(len(source) * block_bytes)
                flight.add(self._link, source, destination)
                flight.land(PIECES_IN_FLIGHT - 1)
        finally:
            flight.land(0)  # also when cancelled: after the pull nothing writes to the destination's blocks
        if self._checksum:
            for source, destination in _pieces(source_blocks, destination_blocks, self._piece_blocks):
                if not self._link.delivered(source, destination):
                    raise ChecksumMismatch(type(self._link).__name__, f"{len(source)} blocks arrived corrupted")
        return Pulled(len(source_blocks), len(source_blocks) * block_bytes, flight.copy_s, paced_s)

    def close(self) -> None:
        """Close the link to the peer's memory."""
        self._link.close()

    def _pace(self, pacers: Sequence[Pacer], is_cancelled: Callable[[], bool]) -> float:
        """Wait until a piece may start; return the seconds slept."""
        slept_s = 0.0
        while True:
            if is_cancelled():
                raise PullCancelled(type(self._link).__name__, "the pull was cancelled")
            wait_s = min(max(pacer.wait_s() for pacer in pacers), PIECE_S)
            if not wait_s:
                return slept_s
            time.sleep(wait_s)
            slept_s += wait_s

    def _check(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        name = type(self._link).__name__
        if len(source_blocks) != len(destination_blocks):
            raise TransportFailed(name, f"{len(source_blocks)} blocks for {len(destination_blocks)}")
        sides = (source_blocks, self._link.source), (destination_blocks, self._link.destination)
        for blocks, layout in sides:
            if blocks and not 0 <= min(blocks) <= max(blocks) < layout.num_blocks:
                raise TransportFailed(name, f"a block id is outside of 0 to {layout.num_blocks - 1}")
        if len(set(destination_blocks)) != len(destination_blocks):
            raise TransportFailed(name, "a destination block is named twice")


class _Pieces:
    """Pieces of one pull under way.  `copy_s`: time spent beginning them and waiting for them."""

    def __init__(self) -> None:
        self.copy_s = 0.0
        self._waits: collections.deque[Wait] = collections.deque()

    def add(self, link: Link, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        """Begin a piece."""
        began_s = time.perf_counter()
        self._waits.append(link.begin(source_blocks, destination_blocks))
        self.copy_s += time.perf_counter() - began_s

    def land(self, most: int) -> None:
        """Wait until at most `most` pieces are under way."""
        began_s = time.perf_counter()
        with contextlib.ExitStack() as landings:  # waits for each piece, also after a failed one
            while len(self._waits) > most:
                landings.callback(self._waits.popleft())
        self.copy_s += time.perf_counter() - began_s


def require_fit(transport: str, source: KvLayout, destination: KvLayout) -> None:
    """Raise TransportFailed unless both sides have blocks of the same shape."""
    if not source.fits(destination):
        raise TransportFailed(transport, f"blocks differ: {source} there, {destination} here")


def _pieces(
    source: Sequence[int], destination: Sequence[int], length: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    for start in range(0, len(source), length):
        yield source[start : start + length], destination[start : start + length]
