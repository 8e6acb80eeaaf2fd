"""The arena of one device: KV memory that its workers share, each using the granules granted to it.

Owns the memory, which lives as long as the daemon.  Who has which granule, `landlord` knows.
"""

import asyncio
import os
from collections.abc import Iterable

from melld.engine.arena_file import punch
from melld.engine.gpu_memory import made_by_another
from melld.engine.wire.spec import ArenaSpec


class GpuArena:
    """GPU memory for `nbytes` of KV, allocated at once.  Making it takes seconds.

    Raises:
        NoSharedMemory: the GPU has not so much, or cannot share it.
    """

    def __init__(self, uuid: str, nbytes: int, granule_bytes: int) -> None:
        self.resident_bytes = nbytes
        self._files, self._chunks = made_by_another(uuid, nbytes)
        self._granule_bytes = granule_bytes

    def spec(self) -> ArenaSpec:
        """See `Arena.spec`."""
        return ArenaSpec(
            nbytes=self.resident_bytes,
            granule_bytes=self._granule_bytes,
            chunks=self._chunks,
            files=tuple(self._files),
        )

    async def scrub(self, granules: Iterable[int]) -> None:
        """Do nothing: the worker that is granted these granules zeroes them, as this process has no CUDA context."""

    def close(self) -> None:
        """Close the descriptors; workers that have the memory mapped keep it until they end."""
        for file in self._files:
            os.close(file)


class Arena:
    """Memory of a CPU device for `nbytes` of KV, in granules that take no memory before they are used."""

    def __init__(self, nbytes: int, granule_bytes: int) -> None:
        self._nbytes = nbytes
        self._granule_bytes = granule_bytes
        self._file = os.memfd_create("melld-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._file, nbytes)

    def spec(self) -> ArenaSpec:
        """Return the arena for workers of this daemon."""
        path, inode = f"/proc/{os.getpid()}/fd/{self._file}", os.fstat(self._file).st_ino
        return ArenaSpec(path=path, inode=inode, nbytes=self._nbytes, granule_bytes=self._granule_bytes)

    @property
    def resident_bytes(self) -> int:
        """Return how much memory it takes now."""
        return os.fstat(self._file).st_blocks * 512

    async def scrub(self, granules: Iterable[int]) -> None:
        """Free the memory of these unused granules; they then read as zeros."""
        await asyncio.to_thread(self._scrub, sorted(granules))

    def _scrub(self, granules: list[int]) -> None:
        for granule in granules:
            punch(self._file, granule * self._granule_bytes, self._granule_bytes)

    def close(self) -> None:
        """Close the file; workers that have it mapped keep the memory until they end."""
        os.close(self._file)


AnyArena = Arena | GpuArena
