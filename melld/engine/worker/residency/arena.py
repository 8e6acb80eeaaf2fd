"""An engine whose KV cache is in its device's arena, of which it may use only what it is granted.

Owns its mapping in a worker, and that granules are zero when they are first used.  Blocks are outermost (`BLHNC`), so
that a block's bytes lie together.  vLLM's CPU attention does not name that layout among its own, and reads it all the
same: within a block nothing differs.  On a GPU the attention must name a layout with blocks outermost.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from melld.engine.arena_file import keep_to_itself, punch
from melld.engine.gpu_memory import map_chunks
from melld.engine.wire.spec import ArenaSpec
from melld.engine.worker.residency.memory import over
from melld.errors import MelldError
from melld.landlord.blocks import BlockMap
from melld.landlord.granules import GRANULE_BLOCKS
from melld.migrate.transports.layout import KvLayout
from melld.migrate.transports.shared_memory import map_file, open_file

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor import Executor

LAYOUT = "BLHNC"


class FileMemory:
    """An arena on a CPU device, in the daemon's memory file: returned memory is freed, and then reads as zeros."""

    def __init__(self, spec: ArenaSpec) -> None:
        """Open it; raise `OSError` if it is not there."""
        self._spec = spec
        self._file = open_file(spec.path, spec.inode)

    def storage(self, _nbytes: int, _device: torch.device) -> torch.UntypedStorage:
        """Return the arena, mapped into this process."""
        storage = map_file(f"/proc/self/fd/{self._file}", self._spec.nbytes)
        keep_to_itself(storage.data_ptr(), self._spec.granule_bytes)  # granule 0: each engine tries itself out there
        return storage

    def begin(self, granules: Iterable[int]) -> None:
        """Zero these unused granules: they already are."""

    def end(self, granules: Iterable[int]) -> None:
        """Release these granules: nothing in this process may touch them from now on."""
        size = self._spec.granule_bytes
        for granule in granules:
            punch(self._file, granule * size, size)


class ChunkMemory:
    """An arena in chunks of GPU memory, made by another process: granted memory is zeroed.

    The daemon cannot do that for a worker that has died.
    """

    def __init__(self, spec: ArenaSpec) -> None:
        self._spec = spec
        self._bytes: torch.Tensor

    def storage(self, _nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Return the arena, mapped into this process on its device; raise `NoSharedMemory` if the driver refuses."""
        address = map_chunks(self._spec.files, self._spec.chunks)
        make = torch._C._construct_storage_from_data_pointer  # noqa: SLF001  as torch's own CUDA graphs do
        storage: torch.UntypedStorage = make(address, device, self._spec.nbytes)
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        return storage

    def begin(self, granules: Iterable[int]) -> None:
        """Zero these unused granules."""
        size = self._spec.granule_bytes
        for granule in granules:
            self._bytes[granule * size : (granule + 1) * size].zero_()
        self._finish()

    def end(self, granules: Iterable[int]) -> None:  # noqa: ARG002  whoever gets them zeroes them
        """Release these granules, once the device no longer uses them."""
        self._finish()

    def _finish(self) -> None:
        if self._bytes.device.type == "cuda":
            torch.cuda.synchronize(self._bytes.device)


class NotLent(MelldError):
    """The engine's KV cannot be in the GPU's arena, and there is no other memory for it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"with [devices] lent_kv_bytes its KV must be in lent memory, and cannot be: {why}")


class ArenaMemory:
    """The arena of this worker's device."""

    def __init__(self, spec: ArenaSpec) -> None:
        """Find the arena.

        Raises:
            OSError: it is not there.
        """
        self.spec = spec
        self.memory = ChunkMemory(spec) if spec.chunks else FileMemory(spec)
        self.failure = ""
        """Why the engine's KV is not in it."""

    def hold_kv_of(self, executor: "type[Executor]") -> "type[Executor]":
        """Return a subclass of the executor that puts the KV cache here, or says why not in `failure`."""
        arena = self

        class InArena(executor):  # type: ignore[misc]
            def get_kv_cache_specs(self) -> Any:
                specs = super().get_kv_cache_specs()
                each_layer = [spec for layers in specs for spec in layers.values()]
                if each_layer:
                    arena.refuse(_refusal(self.vllm_config, each_layer, arena.spec.granule_bytes))
                else:
                    arena.failure = "the model keeps no KV"
                return specs

            def get_supported_kv_cache_layouts(self) -> Any:
                own = super().get_supported_kv_cache_layouts()
                if arena.failure:
                    return own
                if self.vllm_config.device_config.device_type == "cpu":
                    return [[LAYOUT]]
                outermost = [name for name in own[0] if name.startswith("B")]
                arena.refuse("" if outermost else f"its attention wants blocks to lie as {', '.join(own[0])}")
                return [outermost]

            def determine_available_memory(self) -> Any:
                own = super().determine_available_memory()
                return own if arena.failure else [arena.spec.nbytes]

            def initialize_from_config(self, kv_cache_configs: Any) -> None:
                from vllm.v1.worker import gpu_model_runner as runner

                allocate = runner.allocate_kv_cache
                if not arena.failure:
                    runner.allocate_kv_cache = over(arena.memory.storage, allocate)
                try:
                    super().initialize_from_config(kv_cache_configs)
                finally:
                    runner.allocate_kv_cache = allocate

        return InArena

    def refuse(self, why: str) -> None:
        """Note why the engine's KV cannot be here, if it cannot.

        Raises:
            NotLent: it can be nowhere else.
        """
        self.failure = why
        if why and self.spec.chunks:
            raise NotLent(why)

    def blocks(self, layout: KvLayout) -> BlockMap:
        """Return where the blocks of this layout lie."""
        assert layout.chunk_offsets == (0,), layout
        return BlockMap(layout.block_stride_bytes, layout.num_blocks, self.spec.granule_bytes)


def _refusal(config: "VllmConfig", specs: list[Any], granule_bytes: int) -> str:
    """Return why the KV of this engine with one device cannot be in an arena; empty if it can."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    plain = all(type(spec) in (FullAttentionSpec, MLAAttentionSpec) for spec in specs)
    if not plain or len({spec.dtype for spec in specs}) > 1:
        return "the model's layers are not all of plain full attention with one data type"
    if config.use_v2_model_runner:
        return "blocks can be moved between steps of vLLM's first model runner alone"
    if config.cache_config.num_gpu_blocks_override is not None:
        return "the engine's options set how much KV it has"
    block_bytes = sum(spec.page_size_bytes for spec in specs)
    if block_bytes * GRANULE_BLOCKS > granule_bytes:
        return f"its blocks have {block_bytes} bytes: fewer than {GRANULE_BLOCKS} fit into a granule of {granule_bytes}"
    return ""
