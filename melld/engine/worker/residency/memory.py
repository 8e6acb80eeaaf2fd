"""A worker's KV memory for its siblings: its tensors, layout and location.

Owns the seam by which vLLM's KV cache gets memory of ours, and the search for its tensors inside vLLM;
`migrate/transports` owns the bytes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from melld.engine.worker.residency.runner import model_runner_of
from melld.migrate.transports import shared_memory
from melld.migrate.transports.layout import KvLayout, layout_of

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class KvMemory:
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


def kv_memory_of(engine: "EngineCore") -> KvMemory:
    """Return the KV cache of an engine with one device, in this process; raise `UnsupportedLayout` as `KvMemory`."""
    return KvMemory(model_runner_of(engine), engine.scheduler.kv_cache_config.num_blocks)


def _tensors_of(runner: Any) -> list[torch.Tensor]:
    """Return each tensor object of a KV cache: the runner's, and those of the attention layers."""
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    found = [*runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers)]
    distinct = {id(tensor): tensor for tensor in found if isinstance(tensor, torch.Tensor) and tensor.numel()}
    return list(distinct.values())


def hold_kv_in_shared_memory() -> None:
    """Put a CPU device's KV cache, in this process and ranks forked from it, where siblings can map it.

    Copied there once vLLM has made and zeroed it, it would take twice its memory, and a second and a half for each GiB.
    """
    from vllm.v1.worker import gpu_model_runner as runner

    runner.allocate_kv_cache = over(lambda nbytes, _: shared_memory.allocate(nbytes), runner.allocate_kv_cache)


def over(memory: Callable[[int, torch.device], torch.UntypedStorage], allocate: Any) -> Any:
    """Return vLLM's `allocate_kv_cache` with its tensors over `memory` of so many bytes, on that device.

    The memory must be zeros where it is used.  vLLM makes its views as always; only what lies under them is ours.
    """

    def place(kv_cache_config: Any, device: torch.device, *rest: Any) -> dict[str, torch.Tensor]:
        if device.type == "meta":  # asked by another of these
            return dict(allocate(kv_cache_config, device, *rest))
        made: dict[str, torch.Tensor] = allocate(kv_cache_config, torch.device("meta"), *rest)
        if not made:
            return made
        [nbytes] = {tensor.untyped_storage().nbytes() for tensor in made.values()}
        storage = memory(nbytes, device)
        return {
            name: torch.empty(0, dtype=tensor.dtype, device=device).set_(
                storage, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            for name, tensor in made.items()
        }

    return place
