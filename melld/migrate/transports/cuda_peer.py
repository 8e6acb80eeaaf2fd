"""CUDA devices that can reach each other's memory, or two workers on one device: the destination reads it directly.

Owns the mapping of a peer's allocation and the copy out of it.  The mapping lives in the destination device's own
context: none is made on the source's device, whose process does nothing.  Devices are matched by UUID.

A copy is one kernel launch, or one batched call of the driver's copy engines: whichever `tune` measured to be
faster on this link.
"""

import enum
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from melld.migrate.transports import cuda_runtime
from melld.migrate.transports.layout import KvLayout, packed_layout, paired_views
from melld.migrate.transports.transport import KvHandle, TransportFailed, checksum_of, require_fit

NAME = "cuda_peer"


class Copier(enum.StrEnum):
    """What moves the bytes."""

    KERNEL = "kernel"  # SMs, one launch
    ENGINES = "engines"  # copy engines, one batched call


class CudaWhere(msgspec.Struct, frozen=True):
    """An allocation of another process: the device's UUID, its IPC handle, and where in it the region begins."""

    uuid: str
    handle: bytes
    offset: int


def export(tensors: Sequence[torch.Tensor], layout: KvLayout) -> bytes:
    """The handle of the tensors' one allocation, which must stay as long as a peer may read it.

    Raises:
        TransportFailed: the allocation cannot be shared (an expandable segment, vLLM's sleep-mode pool).
    """
    storage = tensors[0].untyped_storage()
    device = tensors[0].device
    with torch.cuda.device(device):
        handle, offset = cuda_runtime.ipc_handle(storage.data_ptr())
    index = device.index if device.index is not None else torch.cuda.current_device()
    where = CudaWhere(cuda_runtime.device_uuid(index), handle, offset)
    return KvHandle(NAME, layout, msgspec.msgpack.encode(where)).encode()


def open_link(handle: KvHandle, region: torch.Tensor, layout: KvLayout) -> "CudaPeerLink":
    """Map the peer's region for our device (`region`: our allocation's bytes, uint8, on it).

    Raises:
        TransportFailed: the peer is gone, out of reach of this device, or has blocks of another shape.
    """
    require_fit(NAME, handle.layout, layout)
    where = msgspec.msgpack.decode(handle.where, type=CudaWhere)
    peer = cuda_runtime.device_of_uuid(where.uuid)
    if peer is None:
        raise TransportFailed(NAME, f"device {where.uuid} is not visible to this process")
    ours = region.device.index
    if peer != ours and not torch.cuda.can_device_access_peer(ours, peer):
        raise TransportFailed(NAME, f"device {ours} has no peer access to device {peer}")
    base = cuda_runtime.open_ipc_handle(where.handle, ours)
    return CudaPeerLink(base, where.offset, handle.layout, region, layout)


class CudaPeerLink:
    """The peer's region, readable from our device, and ours."""

    def __init__(self, base: int, offset: int, source: KvLayout, region: torch.Tensor, destination: KvLayout) -> None:
        self.source = source
        self.destination = destination
        self._base = base
        self._peer = base + offset
        self._region = region
        self._device = region.device
        self._stream = torch.cuda.Stream(device=self._device)
        self._copiers = self._available()
        if not self._copiers:
            raise TransportFailed(NAME, "neither Triton nor batched copies can be used here")
        self.copier = next(iter(self._copiers))
        self.measured_s: dict[Copier, float] = {}

    def copy(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        """See `Link`.  The GIL is free while the device works."""
        if not source_blocks:
            return
        address = self._region.untyped_storage().data_ptr()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._copiers[self.copier](address, self.destination, source_blocks, destination_blocks)
            self._stream.synchronize()

    def tune(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        """See `Link`: SMs or copy engines.  `measured_s` keeps both times."""
        measured = self.measured_s
        for copier in self._copiers:
            self.copier = copier
            self.copy(source_blocks, destination_blocks)  # compiles, and maps
            began_s = time.perf_counter()
            self.copy(source_blocks, destination_blocks)
            measured[copier] = time.perf_counter() - began_s
        self.copier = min(measured, key=measured.__getitem__)

    def checksum(self, side: str, blocks: Sequence[int]) -> int:
        """See `Link`.  The source's blocks are read over the link a second time, into memory of ours."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if side == "destination":
                views = paired_views(self._region, self.destination, self._region, self.destination)
                return checksum_of([ours for ours, _ in views], torch.tensor(blocks, device=self._device))
            packed = packed_layout(self.destination, len(blocks))
            read = torch.empty(packed.region_bytes, dtype=torch.uint8, device=self._device)
            copy = self._by_engines if self.copier is Copier.ENGINES else self._kernel(packed)
            assert copy is not None, "the packed layout lies on words where the other does"
            copy(read.data_ptr(), packed, blocks, range(len(blocks)))
            views = paired_views(read, packed, self._region, self.destination)
            return checksum_of(
                [packed_view for packed_view, _ in views], torch.arange(len(blocks), device=self._device)
            )

    def close(self) -> None:
        """Unmap the peer's memory."""
        self._stream.synchronize()
        cuda_runtime.close_ipc_handle(self._base, self._device.index)

    def _available(self) -> "dict[Copier, _Copy]":
        ways: dict[Copier, _Copy] = {}
        if kernel := self._kernel(self.destination):
            ways[Copier.KERNEL] = kernel
        if cuda_runtime.batch_copies_supported():
            ways[Copier.ENGINES] = self._by_engines
        return ways

    def _kernel(self, destination: KvLayout) -> "_Copy | None":
        try:
            from melld.migrate.transports.cuda_kernel import ChunkCopier
        except ImportError:  # a torch without Triton
            return None
        if not (ChunkCopier.applicable(self.source) and ChunkCopier.applicable(destination)):
            return None
        copier = ChunkCopier(self.source, destination, self._device)

        def launch(address: int, _layout: KvLayout, source: Sequence[int], target: Sequence[int]) -> None:
            ids = torch.tensor([list(source), list(target)], dtype=torch.int64).pin_memory()
            on_device = ids.to(self._device, non_blocking=True)
            copier.launch(self._peer, address, on_device[0], on_device[1])

        return launch

    def _by_engines(self, address: int, layout: KvLayout, source: Sequence[int], target: Sequence[int]) -> None:
        come_from = cuda_runtime.chunk_addresses(
            self._peer, source, self.source.block_stride_bytes, self.source.chunk_offsets
        )
        go_to = cuda_runtime.chunk_addresses(address, target, layout.block_stride_bytes, layout.chunk_offsets)
        cuda_runtime.copy_batch(go_to, come_from, layout.chunk_bytes, self._stream)


_Copy = Callable[[int, KvLayout, Sequence[int], Sequence[int]], None]
