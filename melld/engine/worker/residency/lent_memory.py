"""The memory of an arena in a worker: a file on a CPU device, chunks that another process made on a GPU.

Owns the mapping, and that granules are zero when they are first used.

    CPU    what is given back is freed, and then reads as zeros
    GPU    what is granted is zeroed, as the daemon cannot do it for a worker that has died
"""

from collections.abc import Iterable
from typing import Protocol

import torch

from melld.engine.arena_file import keep_to_itself, punch
from melld.engine.gpu_memory import map_chunks
from melld.engine.wire.spec import ArenaSpec
from melld.migrate.transports.shared_memory import map_file, open_file


class LentMemory(Protocol):
    """All of a device's arena."""

    def storage(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Return the arena, mapped into this process on its device; an engine needs `nbytes` of it."""

    def begin(self, granules: Iterable[int]) -> None:
        """Have these granules, which nobody uses, be zeros."""

    def end(self, granules: Iterable[int]) -> None:
        """Let go of these granules: nothing in this process may touch them from now on."""


class FileMemory:
    """An arena in the daemon's memory file."""

    def __init__(self, spec: ArenaSpec) -> None:
        """Open it; raise `OSError` if it is not there."""
        self._spec = spec
        self._file = open_file(spec.path, spec.inode)

    def storage(self, _nbytes: int, _device: torch.device) -> torch.UntypedStorage:
        """See `LentMemory`."""
        storage = map_file(f"/proc/self/fd/{self._file}", self._spec.nbytes)
        keep_to_itself(storage.data_ptr(), self._spec.granule_bytes)  # granule 0: each engine tries itself out there
        return storage

    def begin(self, granules: Iterable[int]) -> None:
        """See `LentMemory`: they are."""

    def end(self, granules: Iterable[int]) -> None:
        """See `LentMemory`."""
        size = self._spec.granule_bytes
        for granule in granules:
            punch(self._file, granule * size, size)


class ChunkMemory:
    """An arena in chunks of GPU memory."""

    def __init__(self, spec: ArenaSpec) -> None:
        self._spec = spec
        self._bytes: torch.Tensor

    def storage(self, _nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """See `LentMemory`; raise `NoSharedMemory` if the driver refuses."""
        address = map_chunks(self._spec.files, self._spec.chunks)
        make = torch._C._construct_storage_from_data_pointer  # noqa: SLF001  as torch's own CUDA graphs do
        storage: torch.UntypedStorage = make(address, device, self._spec.nbytes)
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        return storage

    def begin(self, granules: Iterable[int]) -> None:
        """See `LentMemory`."""
        size = self._spec.granule_bytes
        for granule in granules:
            self._bytes[granule * size : (granule + 1) * size].zero_()
        self._finish()

    def end(self, granules: Iterable[int]) -> None:  # noqa: ARG002  whoever gets them zeroes them
        """See `LentMemory`: wait until the device has done with them."""
        self._finish()

    def _finish(self) -> None:
        if self._bytes.device.type == "cuda":
            torch.cuda.synchronize(self._bytes.device)


def lent_memory(spec: ArenaSpec) -> LentMemory:
    """Return the memory of this arena; raise `OSError` if it is not there."""
    return ChunkMemory(spec) if spec.chunks else FileMemory(spec)
