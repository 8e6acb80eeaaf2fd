"""A worker's KV memory as its siblings see it: every tensor of it found, its layout read, its handle made.

Owns finding the tensors inside vLLM; the bytes are `migrate/transports`' business.
"""

from typing import TYPE_CHECKING, Any

import torch

from melld.migrate.transports.layout import KvLayout, layout_of

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class KvMemory:
    """The KV cache of one engine, for `migrate/transports`."""

    def __init__(self, engine: "EngineCore") -> None:
        """Read the layout.

        Raises:
            UnsupportedLayout: the blocks are not of one shape, in one allocation.
        """
        self.tensors = kv_cache_tensors(engine)
        scheduler: Any = engine.scheduler
        self.layout: KvLayout = layout_of(self.tensors, scheduler.kv_cache_config.num_blocks)

    @property
    def region(self) -> torch.Tensor:
        """The allocation's bytes (uint8), as it lies now: ask again after it was moved by an export."""
        tensor = self.tensors[0]
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def kv_cache_tensors(engine: "EngineCore") -> list[torch.Tensor]:
    """Each tensor object through which the engine reaches its KV cache: the runner's, and the attention layers' own."""
    executor: Any = engine.model_executor
    runner = executor.driver_worker.worker.model_runner
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    found = [*runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers)]
    distinct = {id(tensor): tensor for tensor in found if isinstance(tensor, torch.Tensor) and tensor.numel()}
    return list(distinct.values())
