"""Mamba 1 in torch: vLLM's CPU build has no scan of a prompt, and its kernel for single tokens knows Mamba 2 alone.

Owns the arithmetic.  A prompt's tokens are computed like generated ones, so its state does not depend on how it is cut.
"""

import torch


def update_states(
    ssm_states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor | None,
    *,
    z: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: object,
) -> None:
    """Take the next token [sequences, dim] of each sequence; stands for vLLM's `selective_state_update`."""
    slots = state_batch_indices.reshape(len(x), -1)[:, 0].long()  # of one column, or of none
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias
    if dt_softplus:
        steps = steps.clamp(min=0.0) + (-steps.abs()).exp().log1p()
    states = ssm_states[slots].float() * (steps[..., None] * a).exp() + (steps * x)[..., None] * b[:, None]
    ssm_states[slots] = states.to(ssm_states.dtype)
    result = (states * c[:, None]).sum(-1) + d * x
    out.copy_(result if z is None else result * z / (1.0 + (-z.float()).exp()))


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    ssm_states: torch.Tensor,
    *_: object,
) -> None:
    """Take the tokens [dim, tokens] of each sequence, and write the output over `z`, or over `delta` without one.

    Stands for `vllm._custom_ops.selective_scan_fwd`.
    """
    out = delta if z is None else z
    inputs, steps, gates = (None if part is None else part.T.contiguous() for part in (u, delta, z))
    to_state, to_output = (part[0].T.contiguous() for part in (b, c))
    assert inputs is not None
    assert steps is not None
    result = torch.empty_like(inputs)
    starts = query_start_loc.tolist()
    for number, is_begun in enumerate(has_initial_state.tolist()):
        slot = cache_indices[number : number + 1]
        if not is_begun:
            ssm_states[slot.long()] = 0
        for token in range(starts[number], starts[number + 1]):
            one = slice(token, token + 1)
            update_states(
                ssm_states,
                inputs[one],
                steps[one],
                a,
                to_state[one],
                to_output[one],
                d,
                delta_bias,
                z=None if gates is None else gates[one],
                dt_softplus=delta_softplus,
                state_batch_indices=slot,
                out=result[one],
            )
    out.copy_(result.T)
