"""What a model's layers keep of a request, read from vLLM's descriptions of their blocks."""

from collections.abc import Iterable, Iterator
from typing import Any

from melld.kvstore.kept import Kept, kind_of


def kept_by(specs: Iterable[Any]) -> Kept:
    """Return what layers keep whose blocks vLLM describes so (vllm.v1.kv_cache_interface.KVCacheSpec)."""
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
    """Return the kind of what a layer keeps (`melld.kvstore.kept`).

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
