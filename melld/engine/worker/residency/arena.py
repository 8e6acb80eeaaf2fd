"""An engine whose KV cache is its device's arena, of which it may use what it is granted.

The arena's memory is neither allocated nor zeroed here.  Blocks are outermost (`BLHNC`), so that a block's bytes lie
together.  vLLM's CPU attention does not name that layout among its own, and reads it all the same: within a block
nothing differs.
"""

from typing import TYPE_CHECKING, Any

from melld.engine.arena_file import keep_to_itself
from melld.engine.wire.spec import ArenaSpec
from melld.engine.worker.residency.memory import over
from melld.landlord.blocks import BlockMap
from melld.landlord.granules import GRANULE_BLOCKS
from melld.migrate.transports.layout import KvLayout
from melld.migrate.transports.shared_memory import map_file, open_file

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor import Executor

LAYOUT = "BLHNC"


class ArenaMemory:
    """The arena, mapped into this process."""

    def __init__(self, spec: ArenaSpec) -> None:
        """Map the arena.

        Raises:
            OSError: it is not there.
        """
        self.spec = spec
        self.file = open_file(spec.path, spec.inode)
        self.storage = map_file(f"/proc/self/fd/{self.file}", spec.nbytes)
        keep_to_itself(self.storage.data_ptr(), spec.granule_bytes)  # granule 0: each engine tries itself out there
        self.failure = ""
        """Why the engine's KV is not in it."""

    def hold_kv_of(self, executor: "type[Executor]") -> "type[Executor]":
        """Return a subclass of the executor whose engine has its KV cache here, or says why not in `failure`."""
        arena = self

        class InArena(executor):  # type: ignore[misc]
            def get_kv_cache_specs(self) -> Any:
                specs = super().get_kv_cache_specs()
                each_layer = [spec for layers in specs for spec in layers.values()]
                arena.failure = _refusal(self.vllm_config, each_layer, arena.spec.granule_bytes)
                return specs

            def get_supported_kv_cache_layouts(self) -> Any:
                return super().get_supported_kv_cache_layouts() if arena.failure else [[LAYOUT]]

            def determine_available_memory(self) -> Any:
                own = super().determine_available_memory()
                return own if arena.failure else [arena.spec.nbytes]

            def initialize_from_config(self, kv_cache_configs: Any) -> None:
                from vllm.v1.worker import gpu_model_runner as runner

                allocate = runner.allocate_kv_cache
                if not arena.failure:
                    runner.allocate_kv_cache = over(lambda _: arena.storage, allocate)
                try:
                    super().initialize_from_config(kv_cache_configs)
                finally:
                    runner.allocate_kv_cache = allocate

        return InArena

    def blocks(self, layout: KvLayout) -> BlockMap:
        """Return where the blocks of this layout lie."""
        assert layout.chunk_offsets == (0,), layout
        return BlockMap(layout.block_stride_bytes, layout.num_blocks, self.spec.granule_bytes)


def _refusal(config: "VllmConfig", specs: list[Any], granule_bytes: int) -> str:
    """Return why the KV of this engine with one CPU device cannot be in an arena; empty if it can."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    plain = all(type(spec) in (FullAttentionSpec, MLAAttentionSpec) for spec in specs)
    if not plain or len({spec.dtype for spec in specs}) > 1:
        return "the model's layers are not all of plain full attention with one data type"
    if config.max_concurrent_batches > 1 or config.use_v2_model_runner:
        return "blocks can be moved between steps of vLLM's first model runner alone, one at a time"
    if config.cache_config.num_gpu_blocks_override is not None:
        return "the engine's options set how much KV it has"
    block_bytes = sum(spec.page_size_bytes for spec in specs)
    if block_bytes * GRANULE_BLOCKS > granule_bytes:
        return f"its blocks have {block_bytes} bytes: fewer than {GRANULE_BLOCKS} fit into a granule of {granule_bytes}"
    return ""
