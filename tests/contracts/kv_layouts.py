"""vLLM's own code places and makes KV caches as on a GPU, on the CPU; `layout_of` is checked against them.

A process of its own: it loads vLLM.  Prints what became of each cache.
"""

import sys
from types import SimpleNamespace

import torch
from vllm.platforms import current_platform  # noqa: F401  before its interfaces
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from melld.engine.worker.start import block_bytes_of
from melld.migrate.transports.layout import KvLayout, UnsupportedLayout, layout_of

BLOCKS, LAYERS = 5, 3
KERNEL_TOKENS = 16


def group(*specs: KVCacheSpec) -> KVCacheGroupSpec:
    """Return this many layers of each of these."""
    layers = {f"model.layers.{index}.{kind}": spec for kind, spec in enumerate(specs) for index in range(LAYERS)}
    whole = (
        specs[0] if len(specs) == 1 else UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=layers)
    )
    return KVCacheGroupSpec(list(layers), whole)


FLASH = FullAttentionSpec(block_size=KERNEL_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
SPLIT = FullAttentionSpec(block_size=2 * KERNEL_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=KERNEL_TOKENS, num_kv_heads=1, head_size=36, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(block_size=KERNEL_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
CASES = {
    "FlashAttention": [group(FLASH)],
    "FlashAttention, blocks that the kernel splits": [group(SPLIT)],
    "latent attention": [group(LATENT)],
    "latent attention with an indexer": [group(LATENT, INDEXER)],
    "two groups over each other": [group(FLASH), KVCacheGroupSpec([f"other.{i}" for i in range(LAYERS)], FLASH)],
}


def placed(groups: list[KVCacheGroupSpec], layout: KVCacheLayout) -> KVCacheConfig:
    """Return where vLLM places these caches."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=BLOCKS,
        prefix_cache_retention_interval=None,
    )
    config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None), cache_config=cache)
    return get_kv_cache_config_from_groups(config, groups, 1 << 30)  # type: ignore[arg-type]


def check(groups: list[KVCacheGroupSpec], layout: KVCacheLayout) -> str:
    """Check what `layout_of` makes of the caches, byte by byte of each block."""
    try:
        config = placed(groups, layout)
        kernel = [KERNEL_TOKENS] * len(groups)
        tensors = list(allocate_kv_cache(config, torch.device("cpu"), layout, kernel).values())
    except ValueError as error:
        return f"vLLM refuses it: {str(error)[:40]}"
    try:
        found = layout_of(tensors, config.num_blocks)
    except UnsupportedLayout as error:
        return f"tokens only: {error}"
    of_blocks = [written(tensors, block) for block in range(BLOCKS)]
    for block, mine in enumerate(of_blocks):
        copied = covered(found, block)
        assert not (mine & ~copied).any(), f"{layout}: bytes of block {block} are not copied"
        others = [other for index, other in enumerate(of_blocks) if index != block]
        assert not any((copied & other).any() for other in others), f"{layout}: block {block} has bytes of another"
    engine = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_config=config))
    assert block_bytes_of(engine) * BLOCKS == found.region_bytes  # type: ignore[arg-type]
    return f"{len(found.chunk_offsets)} chunks of {found.chunk_bytes}"


def written(tensors: list[torch.Tensor], block: int) -> torch.Tensor:
    """Return the allocation's bytes that belong to this block in any layer, by the layers' own views."""
    region = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    region.zero_()
    for tensor in tensors:
        split = tensor.shape[0] // BLOCKS
        tensor[block * split : (block + 1) * split] = 1.0  # in bfloat16 neither byte of it is 0
    return region != 0


def covered(layout: KvLayout, block: int) -> torch.Tensor:
    """Return the bytes that a copy of this block moves."""
    mask = torch.zeros(layout.region_bytes, dtype=torch.bool)
    for offset in layout.chunk_offsets:
        start = offset + block * layout.block_stride_bytes
        mask[start : start + layout.chunk_bytes] = True
    return mask


if __name__ == "__main__":
    for name, groups in CASES.items():
        for layout in KVCacheLayout:
            sys.stdout.write(f"{name}|{layout.name}|{check(groups, layout)}\n")
