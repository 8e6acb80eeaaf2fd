"""Moving KV blocks from one worker's memory into another's: what every transport offers.

Owns the shared parts: handles, pacing, checksums, the report of a copy.  Torch only, no vLLM: testable on any machine.

    exporter (source)                        puller (destination)
    export(region) ──► handle bytes ──────► open(handle) ──► Link.pull(source blocks, destination blocks)

The destination pulls; the source's process does nothing, and decodes on.  Handles are plain bytes and name live memory
of a process on this machine: they are worth nothing once it has ended.  A pull releases the GIL while bytes move.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import torch

from melld.errors import MelldError
from melld.migrate.transports.layout import KvLayout


class TransportFailed(MelldError):
    """The peer's memory cannot be opened or copied by this transport; `why` says what was found."""

    status = 503
    code = "transport_failed"

    def __init__(self, transport: str, why: str) -> None:
        super().__init__(f"{transport}: {why}")
        self.transport = transport
        self.why = why


class ChecksumMismatch(TransportFailed):
    """The destination's bytes are not the source's.  The blocks must not be used."""


class PullCancelled(TransportFailed):
    """The pull was ended before its end, as asked."""


class KvHandle(msgspec.Struct, frozen=True):
    """How a peer finds a worker's KV memory.  `where` is read by the transport named `transport` alone."""

    transport: str
    layout: KvLayout
    where: bytes

    def encode(self) -> bytes:
        """As bytes, to be handed through anybody."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "KvHandle":
        """From bytes.

        Raises:
            msgspec.ValidationError: they are no handle.
        """
        return _handles.decode(data)


class Pulled(msgspec.Struct, frozen=True):
    """One pull, as it went.  `copy_s` is the time that bytes moved, `paced_s` the time that the rate limit held it."""

    blocks: int
    nbytes: int
    copy_s: float
    paced_s: float
    verified: bool


Wait = Callable[[], None]
"""Return when a copy that was begun is over: its bytes are there."""


class Link(Protocol):
    """One direction between two workers: the peer's region mapped, ours at hand.  For one thread at a time."""

    source: KvLayout
    destination: KvLayout

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """Begin to copy whole blocks.  Copies end in the order in which they were begun."""

    def tune(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        """Warm up, and find the fastest way on these blocks; ours are overwritten."""

    def checksum(self, side: str, blocks: Sequence[int]) -> int:
        """A number that depends on each byte of the blocks (`"source"` or `"destination"`) and on its place."""

    def close(self) -> None:
        """Give the mapping up."""


PIECES_IN_FLIGHT = 2
"""So many pieces of a pull are under way at once: the device does not idle while the host looks at the clock."""
PIECE_S = 0.02
"""A limited link copies in pieces of so much of its time: what is urgent waits for no longer."""


class Pacer:
    """Holds one link to a rate by sleeping between pieces.  No rate, no sleep."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def book(self, nbytes: int, *, waits: bool = True) -> float:
        """Book these bytes' time on the link, once those before have had theirs if it `waits`.  Seconds slept."""
        if not self._bytes_per_s:
            return 0.0
        now_s = time.monotonic()
        wait_s = max(self._free_at_s - now_s, 0.0) if waits else 0.0
        if wait_s:
            time.sleep(wait_s)
        self._free_at_s = max(self._free_at_s, now_s) + nbytes / self._bytes_per_s
        return wait_s


class Puller:
    """Pulls blocks over one link: in pieces, paced, checked if asked."""

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

        `is_cancelled` is asked before each piece.  Not `paced`: the rate limit does not hold it, but books it.
        `bytes_per_s`: a limit of this pull's own; 0: none.

        Raises:
            TransportFailed: the ids are not blocks of the two regions, or the copy failed.
            ChecksumMismatch: the bytes that arrived are not those that were read.
            PullCancelled: so it was, with some pieces copied.
        """
        self._check(source_blocks, destination_blocks)
        flight, own = _Flight(), Pacer(bytes_per_s)
        block_bytes, piece_blocks, paced_s = self._link.source.block_bytes, self._piece_blocks, 0.0
        if bytes_per_s:
            piece_blocks = max(1, min(piece_blocks, int(bytes_per_s * PIECE_S) // block_bytes))
        try:
            for source, destination in _pieces(source_blocks, destination_blocks, piece_blocks):
                if is_cancelled():
                    raise PullCancelled(type(self._link).__name__, "nobody wants the blocks any more")
                nbytes = len(source) * block_bytes
                paced_s += own.book(nbytes) + self._pacer.book(nbytes, waits=paced)
                flight.add(self._link, source, destination)
                flight.land(PIECES_IN_FLIGHT - 1)
        finally:
            flight.land(0)  # also when cancelled: after its end nothing writes to the destination's blocks
        if self._checksum:
            for source, destination in _pieces(source_blocks, destination_blocks, self._piece_blocks):
                self._verify(source, destination)
        return Pulled(len(source_blocks), len(source_blocks) * block_bytes, flight.copy_s, paced_s, self._checksum)

    def close(self) -> None:
        """Give the peer's memory up."""
        self._link.close()

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

    def _verify(self, source: Sequence[int], destination: Sequence[int]) -> None:
        ours, theirs = self._link.checksum("destination", destination), self._link.checksum("source", source)
        if ours != theirs:
            raise ChecksumMismatch(type(self._link).__name__, f"{len(source)} blocks arrived as other bytes")


class _Flight:
    """The pieces of one pull that are under way.  `copy_s`: the time spent on beginning them and waiting for them."""

    def __init__(self) -> None:
        self.copy_s = 0.0
        self._waits: collections.deque[Wait] = collections.deque()

    def add(self, link: Link, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        """Begin a piece."""
        began_s = time.perf_counter()
        self._waits.append(link.begin(source_blocks, destination_blocks))
        self.copy_s += time.perf_counter() - began_s

    def land(self, most: int) -> None:
        """Wait until no more than so many are under way."""
        began_s = time.perf_counter()
        with contextlib.ExitStack() as landings:  # each is waited for, also after one that failed
            while len(self._waits) > most:
                landings.callback(self._waits.popleft())
        self.copy_s += time.perf_counter() - began_s


def require_fit(transport: str, source: KvLayout, destination: KvLayout) -> None:
    """Raises TransportFailed where a block of one is not a block of the other."""
    if not source.fits(destination):
        raise TransportFailed(transport, f"blocks differ: {source} there, {destination} here")


def checksum_of(views: Sequence[torch.Tensor], blocks: torch.Tensor) -> int:
    """The sum, mod 2**64, of the blocks' words, each times an odd number of its own (views: `layout.block_views`)."""
    total = 0
    for view in views:
        words = view.index_select(1, blocks).to(torch.int64).flatten()
        places = torch.arange(words.numel(), device=words.device, dtype=torch.int64)
        total = (total * 31 + int((words * (places * 0x9E3779B97F4A7C1 + 1)).sum())) % 2**64
    return total


def _pieces(
    source: Sequence[int], destination: Sequence[int], length: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    for start in range(0, len(source), length):
        yield source[start : start + length], destination[start : start + length]


_handles = msgspec.msgpack.Decoder(KvHandle)
