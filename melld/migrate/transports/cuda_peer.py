"""Transport between CUDA devices with peer access, or two workers on one device: the destination reads directly.

Owns the mapping of a peer's allocation and the copy out of it.  The mapping lives in the destination device's own
context; no context is made on the source's device, and the source's process does nothing.  Devices are matched by UUID.

A copy is one kernel launch.  Copy engines are many times slower at so many small pieces: where the kernel cannot be
used, copies go through host memory (`cuda_staged`).
"""

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from melld.migrate.transports import cuda_canary, cuda_runtime
from melld.migrate.transports.layout import KvLayout, packed_layout, paired_views
from melld.migrate.transports.transport import (
    KvHandle,
    Link,
    TransportFailed,
    Wait,
    checksum_of,
    handle_of,
    require_fit,
)

NAME = "cuda_peer"


class CudaMemory(msgspec.Struct, frozen=True):
    """Memory of another process: the IPC handle of its allocation, and the offset in it."""

    handle: bytes
    offset: int

    def map(self, device: int, opened: contextlib.ExitStack) -> int:
        """Map the memory until `opened` is closed; return its address in the context of `device`."""
        base = cuda_runtime.open_ipc_handle(self.handle, device)
        opened.callback(cuda_runtime.close_ipc_handle, base, device)
        return base + self.offset


class CudaWhere(msgspec.Struct, frozen=True):
    """KV memory and canary of another process, on the device of this UUID."""

    uuid: str
    memory: CudaMemory
    canary: CudaMemory
    canary_seed: int


_canaries: list[torch.Tensor] = []  # kept for the life of this process, like the KV memory


def export(tensors: Sequence[torch.Tensor], layout: KvLayout) -> bytes:
    """Return the handle of the tensors' one allocation, which must live as long as a peer may read it.

    Raises:
        TransportFailed: the allocation cannot be shared (an expandable segment, vLLM's sleep-mode pool).
    """
    device = tensors[0].device
    index = device.index if device.index is not None else torch.cuda.current_device()
    seed = secrets.randbits(32)
    with torch.cuda.device(index):
        memory = CudaMemory(*cuda_runtime.ipc_handle(tensors[0].untyped_storage().data_ptr()))
        canary = cuda_canary.pattern(seed).cuda()
        torch.cuda.synchronize()
        _canaries.append(canary)
        canary_memory = CudaMemory(*cuda_runtime.ipc_handle(canary.data_ptr()))
    where = CudaWhere(cuda_runtime.device_uuid(index), memory, canary_memory, seed)
    return handle_of(NAME, layout, where)


def open_link(handle: KvHandle, region: torch.Tensor, layout: KvLayout) -> "CudaPeerLink":
    """Map the peer's region for our device (`region`: our allocation's bytes, uint8, on it).

    Raises:
        TransportFailed: the peer is gone, out of reach of this device, has blocks of another shape or such as the
            kernel does not copy, or its canary does not arrive whole.
    """
    require_fit(NAME, handle.layout, layout)
    where = msgspec.msgpack.decode(handle.where, type=CudaWhere)
    peer = cuda_runtime.device_of_uuid(where.uuid)
    if peer is None:
        raise TransportFailed(NAME, f"device {where.uuid} is not visible to this process")
    ours = region.device.index
    if peer != ours and not torch.cuda.can_device_access_peer(ours, peer):
        raise TransportFailed(NAME, f"device {ours} has no peer access to device {peer}")
    with contextlib.ExitStack() as opened:
        room = torch.empty(cuda_canary.LAYOUT.region_bytes, dtype=torch.uint8, device=region.device)
        canary = CudaPeerLink(where.canary.map(ours, opened), cuda_canary.LAYOUT, room, cuda_canary.LAYOUT)
        cuda_canary.require_delivered(NAME, canary.begin, room, where.canary_seed)
    opened = contextlib.ExitStack()
    with contextlib.ExitStack() as unless_made:
        unless_made.callback(opened.close)
        address = where.memory.map(ours, opened)
        link = CudaPeerLink(address, handle.layout, region, layout, opened)
        unless_made.pop_all()
    return link


class CudaPeerLink(Link):
    """Link between the peer's region, readable from our device, and ours."""

    def __init__(
        self,
        address: int,
        source: KvLayout,
        region: torch.Tensor,
        destination: KvLayout,
        opened: contextlib.ExitStack | None = None,
    ) -> None:
        """`address`: the peer's region, for our device.  `opened`: resources that `close` closes.

        Raises:
            TransportFailed: torch has no Triton, or the kernel does not copy such chunks.
        """
        self.source = source
        self.destination = destination
        self._address = address
        self._region = region
        self._device = region.device
        self._stream = torch.cuda.Stream(device=self._device)
        self._opened = opened or contextlib.ExitStack()
        self._copier = self._copier_into(destination)

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """See `Link`.  Releases the GIL while the device works."""
        address = self._region.untyped_storage().data_ptr()
        return self._launch(self._copier, address, source_blocks, destination_blocks)

    def checksum(self, side: str, blocks: Sequence[int]) -> int:
        """See `Link`.  Reads the source's blocks over the link a second time, into new memory."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if side == "destination":
                views = paired_views(self._region, self.destination, self._region, self.destination)
                return checksum_of([ours for ours, _ in views], torch.tensor(blocks, device=self._device))
            packed = packed_layout(self.destination, len(blocks))
            read = torch.empty(packed.region_bytes, dtype=torch.uint8, device=self._device)
            self._launch(self._copier_into(packed), read.data_ptr(), blocks, range(len(blocks)))()
            views = paired_views(read, packed, self._region, self.destination)
            return checksum_of(
                [packed_view for packed_view, _ in views], torch.arange(len(blocks), device=self._device)
            )

    def close(self) -> None:
        """Unmap the peer's memory."""
        with self._opened:
            self._stream.synchronize()

    def _copier_into(self, layout: KvLayout) -> Any:
        try:
            from melld.migrate.transports.cuda_kernel import ChunkCopier
        except ImportError as error:
            raise TransportFailed(NAME, f"torch has no Triton: {error}") from error
        if not (ChunkCopier.applicable(self.source) and ChunkCopier.applicable(layout)):
            raise TransportFailed(NAME, "the blocks' chunks are not whole words")
        return ChunkCopier(self.source, layout, self._device)

    def _launch(self, copier: Any, address: int, source: Sequence[int], target: Sequence[int]) -> Wait:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if source:
                ids = torch.tensor([list(source), list(target)], dtype=torch.int64).pin_memory()
                on_device = ids.to(self._device, non_blocking=True)
                copier.launch(self._address, address, on_device[0], on_device[1])
            return cuda_runtime.end_of(self._stream)
