"""Transport between CUDA devices with peer access, or two workers on one device: the destination reads directly.

Owns the mapping of a peer's allocation and the copy out of it.  The mapping lives in the destination device's own
context; no context is made on the source's device, and the source's process does nothing.  Devices are matched by UUID.

A copy is one kernel launch or one batched call of the copy engines: whichever `tune` measured to be faster on this
link, among those that delivered the peer's canary.
"""

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from melld.migrate.transports import cuda_canary, cuda_runtime
from melld.migrate.transports.copiers import Begin, Copiers
from melld.migrate.transports.layout import KvLayout, packed_layout, paired_views
from melld.migrate.transports.transport import KvHandle, TransportFailed, Wait, checksum_of, handle_of, require_fit

NAME = "cuda_peer"
KERNEL = "kernel"  # SMs, one launch
ENGINES = "engines"  # copy engines, one batched call
WAYS = (KERNEL, ENGINES)


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


def open_link(handle: KvHandle, region: torch.Tensor, layout: KvLayout, ways: Sequence[str] = WAYS) -> "CudaPeerLink":
    """Map the peer's region for our device (`region`: our allocation's bytes, uint8, on it); try the `ways`.

    Raises:
        TransportFailed: the peer is gone, out of reach of this device, has blocks of another shape, or its canary
            does not arrive whole.
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
        canary = CudaPeerLink(where.canary.map(ours, opened), cuda_canary.LAYOUT, room, cuda_canary.LAYOUT, ways)
        canary.copiers.keep_true(lambda way: cuda_canary.is_delivered(way, room, where.canary_seed))
    opened = contextlib.ExitStack()
    with contextlib.ExitStack() as unless_made:
        unless_made.callback(opened.close)
        address = where.memory.map(ours, opened)
        link = CudaPeerLink(address, handle.layout, region, layout, canary.copiers.names, opened)
        unless_made.pop_all()
    return link


class CudaPeerLink:
    """Link between the peer's region, readable from our device, and ours."""

    def __init__(
        self,
        address: int,
        source: KvLayout,
        region: torch.Tensor,
        destination: KvLayout,
        trusted: Sequence[str],
        opened: contextlib.ExitStack | None = None,
    ) -> None:
        """Prepare the ways to copy.

        `address`: the peer's region, for our device.  `trusted`: the ways that may be used.  `opened`: resources that
        `close` closes.
        """
        self.source = source
        self.destination = destination
        self._address = address
        self._region = region
        self._device = region.device
        self._stream = torch.cuda.Stream(device=self._device)
        self._trusted = trusted
        self._opened = opened or contextlib.ExitStack()
        self.copiers = Copiers(NAME, self._ways(region.untyped_storage().data_ptr(), destination))

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """See `Link`.  Releases the GIL while the device works."""
        return self.copiers.begin(source_blocks, destination_blocks)

    def tune(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
        """See `Link`: choose SMs or copy engines.  `copiers.measured_s` keeps both times."""
        self.copiers.measure(source_blocks, destination_blocks)

    def checksum(self, side: str, blocks: Sequence[int]) -> int:
        """See `Link`.  Reads the source's blocks over the link a second time, into new memory."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if side == "destination":
                views = paired_views(self._region, self.destination, self._region, self.destination)
                return checksum_of([ours for ours, _ in views], torch.tensor(blocks, device=self._device))
            packed = packed_layout(self.destination, len(blocks))
            read = torch.empty(packed.region_bytes, dtype=torch.uint8, device=self._device)
            ways = self._ways(read.data_ptr(), packed)
            Copiers(NAME, {name: ways[name] for name in self.copiers.names}).begin(blocks, range(len(blocks)))()
            views = paired_views(read, packed, self._region, self.destination)
            return checksum_of(
                [packed_view for packed_view, _ in views], torch.arange(len(blocks), device=self._device)
            )

    def close(self) -> None:
        """Unmap the peer's memory."""
        with self._opened:
            self._stream.synchronize()

    def _ways(self, address: int, layout: KvLayout) -> Mapping[str, Begin]:
        """Return the ways to copy into our region at `address`."""
        ways: dict[str, Begin] = {}
        if KERNEL in self._trusted and (launch := self._kernel(address, layout)):
            ways[KERNEL] = self._on_stream(launch)
        if ENGINES in self._trusted and cuda_runtime.batch_copies_supported():
            ways[ENGINES] = self._on_stream(lambda source, target: self._by_engines(address, layout, source, target))
        return ways

    def _on_stream(self, enqueue: "_Enqueue") -> Begin:
        def begin(source: Sequence[int], target: Sequence[int]) -> Wait:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                if source:
                    enqueue(source, target)
                return cuda_runtime.end_of(self._stream)

        return begin

    def _kernel(self, address: int, destination: KvLayout) -> "_Enqueue | None":
        try:
            from melld.migrate.transports.cuda_kernel import ChunkCopier
        except ImportError:  # a torch without Triton
            return None
        if not (ChunkCopier.applicable(self.source) and ChunkCopier.applicable(destination)):
            return None
        copier = ChunkCopier(self.source, destination, self._device)

        def launch(source: Sequence[int], target: Sequence[int]) -> None:
            ids = torch.tensor([list(source), list(target)], dtype=torch.int64).pin_memory()
            on_device = ids.to(self._device, non_blocking=True)
            copier.launch(self._address, address, on_device[0], on_device[1])

        return launch

    def _by_engines(self, address: int, layout: KvLayout, source: Sequence[int], target: Sequence[int]) -> None:
        come_from = cuda_runtime.chunk_addresses(
            self._address, source, self.source.block_stride_bytes, self.source.chunk_offsets
        )
        go_to = cuda_runtime.chunk_addresses(address, target, layout.block_stride_bytes, layout.chunk_offsets)
        cuda_runtime.copy_batch(go_to, come_from, layout.chunk_bytes, self._stream)


_Enqueue = Callable[[Sequence[int], Sequence[int]], None]
