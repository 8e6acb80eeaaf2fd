"""What a model's layers keep of a request, read from vLLM's block specifications.

Used by workers, which have the model, and by `melld check-config`, which builds it without weights.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from melld.kvstore.kept import Kept, kind_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def kept_by(specs: Iterable[Any]) -> Kept:
    """Return what layers with this block specification keep (vllm.v1.kv_cache_interface.KVCacheSpec)."""
    kinds: dict[str, None] = {}
    token_bytes, fixed_bytes = 0.0, 0
    for spec in specs:
        kinds[name := name_of(spec)] = None
        if name.startswith("MambaSpec"):
            fixed_bytes += spec.real_page_size_bytes
        elif kind_of(name).is_bounded:
            tokens = getattr(spec, "sliding_window", 0) or getattr(spec, "attention_chunk_size", 0)
            fixed_bytes += -(-tokens // spec.block_size) * spec.page_size_bytes
        else:
            token_bytes += spec.page_size_bytes / spec.block_size
    return Kept(tuple(kinds), token_bytes, fixed_bytes)


def name_of(spec: Any) -> str:
    """Return the kind of a layer's memory (`melld.kvstore.kept`).

    Blocks of an index, those that do not hold one entry a token, and states that depend on drafts are of no known kind.
    """
    name = type(spec).__name__
    if name == "MambaSpec":
        plain = not spec.num_speculative_blocks
    else:
        plain = getattr(spec, "tokens_per_state", 1) == 1 and getattr(spec, "cache_role", "") != "indexer"
    return name if plain else f"{name}, in another way"


def specs_in(groups: Iterable[Any]) -> Iterator[Any]:
    """Yield the description of each layer of these groups (vllm.v1.kv_cache_interface.KVCacheGroupSpec)."""
    for group in groups:
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        yield from (of_layers.get(layer, group.kv_cache_spec) for layer in group.layer_names)


def specs_without_weights(config: "VllmConfig") -> list[Any]:
    """Return each layer's block specification, from a model built without memory for its weights.

    For a process of its own: it sets up vLLM's process groups, and what the model's layers ask of a GPU opens it.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            meeting = (Path(directory) / "meeting").as_uri()
            parallel_state.init_distributed_environment(1, 0, meeting, 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
            initialize_model(config)
        layers = config.compilation_config.static_forward_context.values()
        own = [one for one in layers if isinstance(one, AttentionLayerBase) and not _shares(one)]
        return [spec for one in own if (spec := one.get_kv_cache_spec(config)) is not None]


def _shares(layer: Any) -> bool:
    """Return True for a layer that reads the KV of an earlier one."""
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None
