"""Transport between CUDA devices with peer access, or two workers on one device: the destination reads directly.

Owns the mapping of a peer's allocation and the copy out of it.  The mapping lives in the destination device's own
context; no context is made on the source's device, and the source's process does nothing.  Devices are matched by UUID.

A copy is one kernel launch.  Copy engines are many times slower at so many small pieces: where the kernel cannot be
used, copies go through host memory (`cuda_staged`).
"""

import contextlib
import secrets
from collections.abc import Callable, Sequence

import msgspec
import torch

from melld.migrate.transports import cuda_canary, cuda_runtime
from melld.migrate.transports.layout import KvLayout
from melld.migrate.transports.transport import KvHandle, Link, TransportFailed, Wait, handle_of, require_fit

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


def open_link(handle: KvHandle, region: torch.Tensor, layout: KvLayout) -> "CudaLink":
    """Map the peer's region for our device (`region`: our allocation's bytes, uint8, on it).

    Raises:
        TransportFailed: the peer is gone, out of reach of this device, has blocks of another shape or such as the
            kernel does not copy, or its canary does not arrive whole.
    """
    ours: int = region.device.index

    def check(peer: int) -> int:
        if peer != ours and not torch.cuda.can_device_access_peer(ours, peer):
            raise TransportFailed(NAME, f"device {ours} has no peer access to device {peer}")
        return ours

    return open_mapped(NAME, CudaPeerLink, check, handle, region, layout)


def open_mapped(
    name: str,
    make: "type[CudaLink]",
    mapped_for: Callable[[int], int],
    handle: KvHandle,
    region: torch.Tensor,
    layout: KvLayout,
) -> "CudaLink":
    """Map the peer's region, once the link that `make` makes of its canary has delivered that whole.

    `mapped_for`: the device that the memory is mapped for, by the peer's device; it raises if there is none.
    """
    require_fit(name, handle.layout, layout)
    where = msgspec.msgpack.decode(handle.where, type=CudaWhere)
    peer = cuda_runtime.device_of_uuid(where.uuid)
    if peer is None:
        raise TransportFailed(name, f"device {where.uuid} is not visible to this process")
    device = mapped_for(peer)
    with contextlib.ExitStack() as opened:
        room = torch.empty(cuda_canary.LAYOUT.region_bytes, dtype=torch.uint8, device=region.device)
        canary = make(where.canary.map(device, opened), device, cuda_canary.LAYOUT, room, cuda_canary.LAYOUT)
        cuda_canary.require_delivered(name, canary.begin, room, where.canary_seed)
    with contextlib.ExitStack() as opened:
        link = make(where.memory.map(device, opened), device, handle.layout, region, layout)
        link.opened = opened.pop_all()
    return link


class CudaLink(Link):
    """Link to a peer's region at an address, mapped for `device`.  `opened`: what `close` closes."""

    def __init__(
        self, address: int, device: int, source: KvLayout, region: torch.Tensor, destination: KvLayout
    ) -> None:
        super().__init__(source, region, destination)
        self.opened = contextlib.ExitStack()
        self._peer, self._peer_device = address, device
        self._stream = torch.cuda.Stream(device=region.device)

    def into(self, region: torch.Tensor, layout: KvLayout) -> "CudaLink":
        """See `Link`."""
        return type(self)(self._peer, self._peer_device, self.source, region, layout)

    def close(self) -> None:
        """Unmap the peer's memory."""
        with self.opened:
            self._stream.synchronize()


class CudaPeerLink(CudaLink):
    """Link between the peer's region, readable from our device, and ours."""

    def __init__(
        self, address: int, device: int, source: KvLayout, region: torch.Tensor, destination: KvLayout
    ) -> None:
        """Prepare the kernel.

        Raises:
            TransportFailed: torch has no Triton, or the kernel does not copy such chunks.
        """
        super().__init__(address, device, source, region, destination)
        try:
            from melld.migrate.transports.cuda_kernel import ChunkCopier
        except ImportError as error:
            raise TransportFailed(NAME, f"torch has no Triton: {error}") from error
        if not (ChunkCopier.applicable(source) and ChunkCopier.applicable(destination)):
            raise TransportFailed(NAME, "the blocks' chunks are not whole words")
        self._copier = ChunkCopier(source, destination, region.device)

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """See `Link`.  Releases the GIL while the device works."""
        with torch.cuda.device(self.region.device), torch.cuda.stream(self._stream):
            if source_blocks:
                ids = torch.tensor([list(source_blocks), list(destination_blocks)], dtype=torch.int64).pin_memory()
                on_device = ids.to(self.region.device, non_blocking=True)
                address = self.region.untyped_storage().data_ptr()
                self._copier.launch(self._peer, address, on_device[0], on_device[1])
            return cuda_runtime.end_of(self._stream)
