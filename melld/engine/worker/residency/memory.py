"""A worker's KV memory for its siblings: its tensors, its layout, and its handle.

Owns the search for the tensors inside vLLM; `migrate/transports` owns the bytes.
"""

from typing import TYPE_CHECKING, Any

import torch

from melld.migrate.transports.layout import KvLayout, layout_of

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class RankMemory:
    """The KV cache of one device, for `migrate/transports`."""

    def __init__(self, runner: Any, num_blocks: int) -> None:
        """Read the layout.

        Raises:
            UnsupportedLayout: the blocks are not of one shape, in one allocation.
        """
        self.tensors = _tensors_of(runner)
        self.layout: KvLayout = layout_of(self.tensors, num_blocks)

    @property
    def region(self) -> torch.Tensor:
        """Return the allocation's bytes (uint8) at its present address, which an export may change."""
        tensor = self.tensors[0]
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class KvMemory(RankMemory):
    """The KV cache of an engine with one device, in this process."""

    def __init__(self, engine: "EngineCore") -> None:
        """Read the layout; raise `UnsupportedLayout` as `RankMemory`."""
        scheduler: Any = engine.scheduler
        executor: Any = engine.model_executor
        super().__init__(executor.driver_worker.worker.model_runner, scheduler.kv_cache_config.num_blocks)


def _tensors_of(runner: Any) -> list[torch.Tensor]:
    """Return each tensor object of a KV cache: the runner's, and those of the attention layers."""
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    found = [*runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers)]
    distinct = {id(tensor): tensor for tensor in found if isinstance(tensor, torch.Tensor) and tensor.numel()}
    return list(distinct.values())
