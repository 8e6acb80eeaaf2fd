"""Transport between CPU workers: the KV cache lies in memory that sibling processes can map.

Owns the memory file.  It has no name in any directory: siblings of the same user find it at `/proc/PID/fd/N`, and it
vanishes with the process, whatever killed it.  It does not count against the size of /dev/shm, which is small in
containers.
"""

import ctypes
import errno
import itertools
import os
from collections.abc import Sequence

import msgspec
import torch

from melld.migrate.transports.layout import KvLayout, paired_views
from melld.migrate.transports.transport import KvHandle, Link, TransportFailed, Wait, done, handle_of, require_fit

NAME = "shared_memory"


class _Where(msgspec.Struct, frozen=True):
    """A memory file: `/proc/PID/fd/N` of the process that has it; the inode detects another with the same PID."""

    path: str
    inode: int
    is_arena: bool = False
    """Only parts of it are used: the others must not be touched, or they would take memory."""


_MADV_POPULATE_READ = 22


_files: dict[int, int] = {}
"""The memory files that this process has made, by the address where they are mapped."""


def allocate(nbytes: int) -> torch.UntypedStorage:
    """Return zeroed memory that siblings can map; it stays until this process ends.

    Raises:
        OSError: there is not so much.
    """
    file = os.memfd_create("melld-kv", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError:
        os.close(file)
        raise
    storage = map_file(f"/proc/self/fd/{file}", nbytes)
    _files[storage.data_ptr()] = file
    return storage


def export(tensors: Sequence[torch.Tensor], layout: KvLayout) -> bytes:
    """Return the handle of the one memory that the tensors lie in.

    Raises:
        TransportFailed: it is not one, or not made by `allocate`.
    """
    [address, *others] = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if others or address not in _files:
        raise TransportFailed(NAME, "the KV cache is not in one piece of memory that can be shared")
    file = _files[address]
    where = _Where(f"/proc/{os.getpid()}/fd/{file}", os.fstat(file).st_ino)
    return handle_of(NAME, layout, where)


def export_arena(path: str, inode: int, layout: KvLayout) -> bytes:
    """Return the handle of a KV cache in the arena at this path, of which the worker uses parts."""
    return handle_of(NAME, layout, _Where(path, inode, is_arena=True))


def open_link(handle: KvHandle, region: torch.Tensor, layout: KvLayout) -> "SharedMemoryLink":
    """Map the peer's region beside ours (`region`: our allocation's bytes, uint8).

    Raises:
        TransportFailed: the peer is gone, is another user's, or has blocks of another shape.
    """
    require_fit(NAME, handle.layout, layout)
    where = msgspec.msgpack.decode(handle.where, type=_Where)
    try:
        file = open_file(where.path, where.inode)
    except OSError as error:
        raise TransportFailed(NAME, f"cannot open the peer's memory: {error.strerror}") from error
    try:
        storage = map_file(f"/proc/self/fd/{file}", handle.layout.region_bytes)
    finally:
        os.close(file)
    if not where.is_arena:
        _populate(storage)
    peer = torch.empty(0, dtype=torch.uint8).set_(storage)
    return SharedMemoryLink(peer, handle.layout, region, layout)


class SharedMemoryLink(Link):
    """Link between the peer's region and ours, both mapped here."""

    def __init__(self, peer: torch.Tensor, source: KvLayout, region: torch.Tensor, destination: KvLayout) -> None:
        super().__init__(source, region, destination)
        self._peer = peer
        # For small copies numpy needs a third of torch's time to begin; it releases the GIL too.
        pairs = paired_views(region, destination, peer, source)
        self._arrays = [(ours.numpy(), theirs.numpy()) for ours, theirs in pairs]

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        """See `Link`.  Blocks that are neighbours on both sides are one copy of all layers; done on return."""
        for start, end in _runs(source_blocks, destination_blocks):
            here, there, count = destination_blocks[start], source_blocks[start], end - start
            for ours, theirs in self._arrays:
                ours[:, here : here + count] = theirs[:, there : there + count]
        return done

    def into(self, region: torch.Tensor, layout: KvLayout) -> "SharedMemoryLink":
        """See `Link`."""
        return SharedMemoryLink(self._peer, self.source, region, layout)

    def close(self) -> None:
        """Unmap the peer's memory."""
        self._peer, self._arrays = torch.empty(0, dtype=torch.uint8), []


def _runs(source: Sequence[int], destination: Sequence[int]) -> list[tuple[int, int]]:
    """Return the stretches [start, end) in which both ids go up by one."""
    breaks = [
        i + 1
        for i, ((a, b), (c, d)) in enumerate(
            zip(itertools.pairwise(source), itertools.pairwise(destination), strict=True)
        )
        if b != a + 1 or d != c + 1
    ]
    edges = [0, *breaks, len(source)] if source else []
    return list(itertools.pairwise(edges))


def open_file(path: str, inode: int) -> int:
    """Return the memory file `/proc/PID/fd/N` of another process, opened here.

    Raises:
        OSError: the process has ended, or is another user's.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(file).st_ino != inode:
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "another process has its number", path)
    return file


def map_file(path: str, nbytes: int) -> torch.UntypedStorage:
    """Return the file's first bytes, mapped into this process, and written to with it."""
    return torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)


def _populate(storage: torch.UntypedStorage) -> None:
    """Make the kernel fill the page tables now; on older kernels the first copies do it."""
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), _MADV_POPULATE_READ
    )
