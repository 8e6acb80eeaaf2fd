"""Gated delta nets in torch: in float32 and with heads of any size, where vLLM's kernels take bfloat16 and two sizes.

Owns the arithmetic; vLLM says which tokens and states are whose.  Each token is computed alone, so a prompt leaves the
same state however it is cut into steps.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

KERNEL = gdn_attention.cpu_gdn_attention_core
KERNEL_HEADS = (64, 128)
"""Head sizes that the kernel takes, where keys and values have the same."""


class _Run(NamedTuple):
    """The tokens of one sequence in a step, and where its states lie."""

    tokens: Any
    """Their places in the step: a slice, or a tensor of indices."""
    slots: list[int]
    """One: of the state before them, and then of that after them.  Several: of the state after each drafted token."""
    begun: int | None
    """The index of the slot with the state before them; None starts with an empty state."""


def gated_delta_net(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Compute the net for all tokens of a step; stands for vLLM's custom op `cpu_gdn_attention_core`."""
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if mixed_qkv.dtype == torch.bfloat16 and layer.head_k_dim == layer.head_v_dim and layer.head_k_dim in KERNEL_HEADS:
        KERNEL(mixed_qkv, b, a, core_attn_out, layer_name)
        return
    if context.attn_metadata is None:
        return
    for run in _runs(context.attn_metadata[layer.prefix]):
        out = _advance(layer, run, mixed_qkv[run.tokens], b[run.tokens], a[run.tokens])
        core_attn_out[run.tokens] = out.to(core_attn_out.dtype)


def _runs(metadata: Any) -> Iterator[_Run]:
    """Yield the sequences of a step, from vLLM's `GDNAttentionMetadata`."""
    plain = metadata.num_decodes + metadata.num_prefills
    if plain:
        starts = metadata.non_spec_query_start_loc.tolist()
        for number, slot in enumerate(metadata.non_spec_state_indices_tensor[:plain].tolist()):
            tokens = _places(metadata.non_spec_token_indx, starts, number)
            is_new = number >= metadata.num_decodes and not metadata.has_initial_state[number]
            yield _Run(tokens, [slot], None if is_new else 0)
    if metadata.num_spec_decodes:
        starts = metadata.spec_query_start_loc.tolist()
        slots = metadata.spec_state_indices_tensor[: metadata.num_spec_decodes].tolist()
        accepted = metadata.num_accepted_tokens.tolist()
        for number, of_drafts in enumerate(slots):
            yield _Run(_places(metadata.spec_token_indx, starts, number), of_drafts, accepted[number] - 1)


def _places(indices: torch.Tensor | None, starts: list[int], number: int) -> Any:
    tokens = slice(starts[number], starts[number + 1])
    return tokens if indices is None else indices[tokens].long()


def _advance(layer: Any, run: _Run, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return the output of the run's tokens, and store the sequence's states after them."""
    states = layer.kv_cache[1]
    q, k, v = (part[0] for part in layer.rearrange_mixed_qkv(_convolve(layer, run, mixed)))
    repeats = v.shape[1] // q.shape[1]
    q, k = (_normalised(part).repeat_interleave(repeats, 1)[..., None] for part in (q, k))
    q, v = q * q.shape[2] ** -0.5, v[..., None]
    decay = (-layer.A_log.float().exp() * _softplus(a.float() + layer.dt_bias.float())).exp()[..., None, None]
    rate = _sigmoid(b.float())[..., None, None]
    state = torch.zeros_like(states[0]) if run.begun is None else states[run.slots[run.begun]]
    state, out = state.to(torch.float32, copy=True), torch.empty_like(v)
    for token in range(len(v)):
        state *= decay[token]
        state.baddbmm_((v[token] - state @ k[token]) * rate[token], k[token].mT)
        torch.bmm(state, q[token], out=out[token])
        if len(run.slots) > 1:
            states[run.slots[token]] = state.to(states.dtype)
    if len(run.slots) == 1:
        states[run.slots[0]] = state.to(states.dtype)
    return out[..., 0]


def _convolve(layer: Any, run: _Run, mixed: torch.Tensor) -> torch.Tensor:
    """Return the run's tokens [tokens, dim], each convolved with those just before it; store the last ones."""
    weight = gdn_attention._unpacked_conv_weight(layer).float()  # noqa: SLF001
    past, count = weight.shape[1] - 1, len(mixed)
    stored = gdn_attention._conv_buffer_view(layer)[run.slots[0]]  # noqa: SLF001
    before = torch.zeros_like(stored[:, :past]) if run.begun is None else stored[:, run.begun : run.begun + past]
    seen = torch.cat((before, mixed.T.to(stored.dtype)), 1)
    if len(run.slots) > 1:
        stored[:, : seen.shape[1] - 1] = seen[:, 1:]  # which of the drafts are accepted is not known yet
    else:
        stored[:, :past] = seen[:, -past:]
    # One addition after the other: a convolution's own order may depend on the number of tokens.
    total = torch.zeros_like(mixed.T, dtype=torch.float32)
    for place in range(past + 1):
        total = total + seen[:, place : place + count].float() * weight[:, place : place + 1]
    if layer.conv1d.bias is not None:
        total = total + layer.conv1d.bias.float()[:, None]
    return (total * _sigmoid(total)).T.contiguous()


def _normalised(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)


# Torch's own take the last few numbers of a tensor by other instructions, so a token's would depend on its neighbours.


def _sigmoid(numbers: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + (-numbers).exp())


def _softplus(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp(min=0.0) + (-numbers.abs()).exp().log1p()
