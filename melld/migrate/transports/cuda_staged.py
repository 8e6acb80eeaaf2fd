"""Transport between CUDA devices without peer access: blocks go through pinned host memory, two pieces in turn.

Owns the host buffers.  The destination's process maps the source's allocation on the source's own device.  The driver
keeps a context there for it, some hundred MiB of that device: the price of leaving the source's process alone.

    source device ──engines──► pinned A ──engines──► destination device      while one is filled, the other is emptied
                           └─► pinned B ─┘
"""

import contextlib
from collections.abc import Sequence

import msgspec
import torch

from melld.migrate.transports import cuda_canary, cuda_peer, cuda_runtime
from melld.migrate.transports.layout import KvLayout, packed_layout, paired_views
from melld.migrate.transports.transport import KvHandle, Link, TransportFailed, Wait, checksum_of, require_fit

NAME = "cuda_staged"
BUFFER_BYTES = 8 << 20


def open_link(handle: KvHandle, region: torch.Tensor, layout: KvLayout) -> "CudaStagedLink":
    """Map the peer's region on its own device (`handle` is made by `cuda_peer.export`).

    Raises:
        TransportFailed: the peer is gone, its device is not visible here, the runtime has no batched copies, or the
            peer's canary does not arrive whole.
    """
    require_fit(NAME, handle.layout, layout)
    where = msgspec.msgpack.decode(handle.where, type=cuda_peer.CudaWhere)
    peer = cuda_runtime.device_of_uuid(where.uuid)
    if peer is None:
        raise TransportFailed(NAME, f"device {where.uuid} is not visible to this process")
    if not cuda_runtime.batch_copies_supported():
        raise TransportFailed(NAME, "this CUDA runtime has no batched copies; CUDA 13.0 or later is needed")
    with contextlib.ExitStack() as opened:
        room = torch.empty(cuda_canary.LAYOUT.region_bytes, dtype=torch.uint8, device=region.device)
        address = where.canary.map(peer, opened)
        canary = CudaStagedLink(address, cuda_canary.LAYOUT, peer, room, cuda_canary.LAYOUT, contextlib.ExitStack())
        cuda_canary.require_delivered(NAME, canary.begin, room, where.canary_seed)
    opened = contextlib.ExitStack()
    with contextlib.ExitStack() as unless_made:
        unless_made.callback(opened.close)
        address = where.memory.map(peer, opened)
        link = CudaStagedLink(address, handle.layout, peer, region, layout, opened)
        unless_made.pop_all()
    return link


class _Buffer:
    """Pinned buffer, one of two, with the events of its last filling and emptying."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.filled = torch.cuda.Event()
        self.emptied: torch.cuda.Event | None = None


class CudaStagedLink(Link):
    """Link between the peer's region, mapped on its device, and ours, with two pinned buffers between them."""

    def __init__(
        self,
        address: int,
        source: KvLayout,
        peer: int,
        region: torch.Tensor,
        destination: KvLayout,
        opened: contextlib.ExitStack,
    ) -> None:
        """Allocate the buffers.  `address`: the peer's region on its device `peer`.  `opened`: what `close` closes."""
        self.source = source
        self.destination = destination
        self._peer, self._peer_device = address, peer
        self._opened = opened
        self._region = region
        self._reading = torch.cuda.Stream(device=peer)
        self._writing = torch.cuda.Stream(device=region.device)
        self._piece_blocks = max(1, BUFFER_BYTES // source.block_bytes)
        self._packed = packed_layout(source, self._piece_blocks)
        self._buffers = [_Buffer(self._packed.region_bytes) for _ in range(2)]

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """See `Link`.  Releases the GIL while the engines work."""
        for start in range(0, len(source_blocks), self._piece_blocks):
            end = start + self._piece_blocks
            buffer = self._buffers[0]
            self._buffers.reverse()
            self._fill(buffer, source_blocks[start:end])
            self._empty(buffer, destination_blocks[start:end])
        with torch.cuda.device(self._region.device):
            return cuda_runtime.end_of(self._writing)

    def checksum(self, side: str, blocks: Sequence[int]) -> int:
        """See `Link`.  Reads the blocks back through the host, a piece at a time."""
        total = 0
        for start in range(0, len(blocks), self._piece_blocks):
            piece = blocks[start : start + self._piece_blocks]
            memory = self._read(side, piece)
            views = paired_views(memory, self._packed, memory, self._packed)
            total = (total * 31 + checksum_of([view for view, _ in views], torch.arange(len(piece)))) % 2**64
        return total

    def close(self) -> None:
        """Unmap the peer's memory."""
        with self._opened:
            self._writing.synchronize()
            self._reading.synchronize()

    def _fill(self, buffer: _Buffer, blocks: Sequence[int]) -> None:
        with torch.cuda.device(self._peer_device):
            if buffer.emptied is not None:
                self._reading.wait_event(buffer.emptied)
            self._move(buffer, self._peer, self.source, blocks, self._reading, to_host=True)
            buffer.filled.record(self._reading)

    def _empty(self, buffer: _Buffer, blocks: Sequence[int]) -> None:
        with torch.cuda.device(self._region.device):
            self._writing.wait_event(buffer.filled)
            region = self._region.untyped_storage().data_ptr()
            self._move(buffer, region, self.destination, blocks, self._writing, to_host=False)
            buffer.emptied = torch.cuda.Event()
            buffer.emptied.record(self._writing)

    def _move(
        self,
        buffer: _Buffer,
        region: int,
        layout: KvLayout,
        blocks: Sequence[int],
        stream: torch.cuda.Stream,
        *,
        to_host: bool,
    ) -> None:
        device = cuda_runtime.chunk_addresses(region, blocks, layout.block_stride_bytes, layout.chunk_offsets)
        packed = self._packed
        places = range(len(blocks))
        host = cuda_runtime.chunk_addresses(
            buffer.memory.data_ptr(), places, packed.block_stride_bytes, packed.chunk_offsets
        )
        destination, source = (host, device) if to_host else (device, host)
        cuda_runtime.copy_batch(destination, source, layout.chunk_bytes, stream)

    def _read(self, side: str, blocks: Sequence[int]) -> torch.Tensor:
        buffer = self._buffers[0]
        region, layout, device, stream = self._peer, self.source, self._peer_device, self._reading
        if side == "destination":
            region, layout = self._region.untyped_storage().data_ptr(), self.destination
            device, stream = self._region.device.index, self._writing
        with torch.cuda.device(device):
            self._move(buffer, region, layout, blocks, stream, to_host=True)
            stream.synchronize()
        return buffer.memory
