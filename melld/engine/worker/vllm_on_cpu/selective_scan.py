"""The scan of Mamba 1, token by token with vLLM's kernel for single tokens: its CPU build has none for a prompt.

Owns the loop alone.  As a prompt's tokens are computed like generated ones, the state does not depend on how it is cut.
"""

import torch
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    ssm_states: torch.Tensor,
    null_block_id: int,
    *_: object,
) -> None:
    """Scan the tokens [dim, tokens] of each sequence, and write the output over `z`, or over `delta` without one.

    Stands for `vllm._custom_ops.selective_scan_fwd`.
    """
    out = delta if z is None else z
    inputs, steps = (part.T.contiguous() for part in (u, delta))
    gates = None if z is None else z.T.contiguous()
    to_state, to_output = (part[0].T.contiguous() for part in (b, c))
    result = torch.empty_like(inputs)
    starts = query_start_loc.tolist()
    for number, slot in enumerate(cache_indices.tolist()):
        if slot == null_block_id:
            continue
        if not has_initial_state[number]:
            ssm_states[slot] = 0
        for token in range(starts[number], starts[number + 1]):
            one = slice(token, token + 1)
            selective_state_update(
                ssm_states,
                inputs[one],
                steps[one],
                a,
                to_state[one],
                to_output[one],
                d,
                z=None if gates is None else gates[one],
                dt_bias=delta_bias,
                dt_softplus=delta_softplus,
                state_batch_indices=cache_indices[number : number + 1],
                dst_state_batch_indices=cache_indices[number : number + 1],
                out=result[one],
            )
    out.copy_(result.T)
