"""Transport between CUDA devices without peer access: blocks go through pinned host memory, two pieces in turn.

Owns the host buffers.  The destination's process maps the source's allocation on the source's own device.  The driver
keeps a context there for it, some hundred MiB of that device: the price of leaving the source's process alone.

    source device ──engines──► pinned A ──engines──► destination device      while one is filled, the other is emptied
                           └─► pinned B ─┘
"""

import contextlib
from collections.abc import Sequence

import torch

from melld.migrate.transports import cuda_runtime
from melld.migrate.transports.cuda_peer import CudaLink, open_mapped
from melld.migrate.transports.layout import KvLayout, packed_layout
from melld.migrate.transports.transport import KvHandle, TransportFailed, Wait

NAME = "cuda_staged"
BUFFER_BYTES = 8 << 20


def open_link(handle: KvHandle, region: torch.Tensor, layout: KvLayout) -> CudaLink:
    """Map the peer's region on its own device (`handle` is made by `cuda_peer.export`).

    Raises:
        TransportFailed: the peer is gone, its device is not visible here, the runtime has no batched copies, or the
            peer's canary does not arrive whole.
    """
    if not cuda_runtime.batch_copies_supported():
        raise TransportFailed(NAME, "this CUDA runtime has no batched copies; CUDA 13.0 or later is needed")
    return open_mapped(NAME, CudaStagedLink, lambda peer: peer, handle, region, layout)


class _Buffer:
    """Pinned buffer, one of two, with the events of its last filling and emptying."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.filled = torch.cuda.Event()
        self.emptied: torch.cuda.Event | None = None


class CudaStagedLink(CudaLink):
    """Link between the peer's region, mapped on its device, and ours, with two pinned buffers between them."""

    def __init__(
        self, address: int, device: int, source: KvLayout, region: torch.Tensor, destination: KvLayout
    ) -> None:
        """Allocate the buffers."""
        super().__init__(address, device, source, region, destination)
        self._reading = torch.cuda.Stream(device=device)
        self._piece_blocks = max(1, BUFFER_BYTES // source.block_bytes)
        self._packed = packed_layout(source, self._piece_blocks)
        self._buffers = [_Buffer(self._packed.region_bytes) for _ in range(2)]

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """See `Link`.  Releases the GIL while the engines work."""
        with contextlib.ExitStack() as begun:
            begun.callback(self._settle)  # if a piece fails, the earlier ones still use the buffers and both regions
            for start in range(0, len(source_blocks), self._piece_blocks):
                end = start + self._piece_blocks
                buffer = self._buffers[0]
                self._buffers.reverse()
                self._fill(buffer, source_blocks[start:end])
                self._empty(buffer, destination_blocks[start:end])
            begun.pop_all()
        with torch.cuda.device(self.region.device):
            return cuda_runtime.end_of(self._stream)

    def close(self) -> None:
        """Unmap the peer's memory."""
        with self.opened:
            self._settle()

    def _settle(self) -> None:
        """Wait until nothing is copied any more."""
        self._reading.synchronize()
        self._stream.synchronize()

    def _fill(self, buffer: _Buffer, blocks: Sequence[int]) -> None:
        with torch.cuda.device(self._peer_device):
            if buffer.emptied is not None:
                self._reading.wait_event(buffer.emptied)
            self._move(buffer, self._peer, self.source, blocks, self._reading, to_host=True)
            buffer.filled.record(self._reading)

    def _empty(self, buffer: _Buffer, blocks: Sequence[int]) -> None:
        with torch.cuda.device(self.region.device):
            self._stream.wait_event(buffer.filled)
            region = self.region.untyped_storage().data_ptr()
            self._move(buffer, region, self.destination, blocks, self._stream, to_host=False)
            buffer.emptied = torch.cuda.Event()
            buffer.emptied.record(self._stream)

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
