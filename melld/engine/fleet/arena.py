"""The arena of one device: memory that its workers share for KV, each in the granules that it was granted.

Owns the memory, which lives as long as the daemon.  Who has which granule, `landlord` knows.
"""

import asyncio
import os
from collections.abc import Iterable

from melld.engine.arena_file import punch
from melld.engine.wire.spec import ArenaSpec


class Arena:
    """Memory for `nbytes` of KV, in granules, of which none takes memory before it is used."""

    def __init__(self, device: str, nbytes: int, granule_bytes: int) -> None:
        self.device = device
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
        """Free the memory of these granules, which nobody uses: they then read as zeros."""
        await asyncio.to_thread(self._scrub, sorted(granules))

    def _scrub(self, granules: list[int]) -> None:
        for granule in granules:
            punch(self._file, granule * self._granule_bytes, self._granule_bytes)

    def close(self) -> None:
        """Close the file; workers that have it mapped keep the memory until they end."""
        os.close(self._file)
