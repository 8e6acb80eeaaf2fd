"""Fixes what vLLM's CPU build computes wrongly, or not at all, in this process before its engine is built.

Owns every such mend.  For each there is a test that fails once the pinned vLLM no longer needs it.
"""

import functools
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba import mamba_mixer
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.kv_cache_interface import KVCacheSpec

from melld.engine.worker.vllm_on_cpu.gated_delta_net import gated_delta_net
from melld.engine.worker.vllm_on_cpu.selective_scan import selective_scan, update_states

ROTARY_KERNEL = RotaryEmbedding.forward_cpu


@functools.cache
def mend() -> None:
    """Fix vLLM, once per process."""
    MambaMixer2.register_oot(name=MambaMixer2.__name__)(WithoutCheckpoints)
    RotaryEmbedding.forward_cpu = rotate
    # vLLM makes an op of this name's function when it builds the first such layer.
    gdn_attention.cpu_gdn_attention_core = gated_delta_net
    MambaMixer.register_oot(name=MambaMixer.__name__)(WithRowsInOrder)
    _custom_ops.selective_scan_fwd = selective_scan
    mamba_mixer.selective_state_update = update_states


class WithoutCheckpoints(MambaMixer2):  # type: ignore[misc]
    """A Mamba 2 layer that exports no state from within a prompt.

    With prefix caching vLLM asks the scan for such states, and the CPU's returns only the last: `IndexError`.
    """

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Return a specification without checkpoints: the scheduler then ends a step where a state must be kept."""
        return MambaBase.get_kv_cache_spec(self, vllm_config)


class WithRowsInOrder(MambaMixer):  # type: ignore[misc]
    """A Mamba 1 layer that copies its linear layers' input, as for adapters: the CPU's need contiguous rows."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.is_lora_enabled = True


def rotate(
    embedding: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate query and key by torch where they are [tokens, heads, dim]: the kernel reads [batch, tokens, dim]."""
    if query.dim() == 2:
        return ROTARY_KERNEL(embedding, positions, query, key)  # type: ignore[no-any-return]
    return embedding.forward_native(positions, query, key)  # type: ignore[no-any-return]
