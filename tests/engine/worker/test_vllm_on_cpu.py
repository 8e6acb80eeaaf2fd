"""melld's fixes to vLLM's CPU build compute correctly and are still needed."""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HEADS, KEY_HEADS, WIDTH, TAPS = 4, 2, 32, 4
DIMENSION = (2 * KEY_HEADS + HEADS) * WIDTH
SLOTS, DRAFTS = 8, 3
WHY = "vLLM no longer needs this mend: delete it"


@pytest.fixture(scope="module")
def mends() -> Any:
    """vLLM's kernels, and the fixes, as a worker on a CPU loads them."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    from melld.engine.worker.vllm_on_cpu import mends

    return mends


# -- rotary embeddings ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["halves", "pairs"])
def embedding(mends: Any, request: Any) -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        yield RotaryEmbedding(WIDTH, WIDTH, 1024, 10000.0, request.param, torch.float32)


POSITIONS = torch.tensor([3, 9, 100, 400, 5, 77, 999])


def heads_of_tokens(is_slice: bool) -> list[torch.Tensor]:
    """Return queries of four heads and keys of one, [tokens, heads, width], as latent attention has them."""
    source = torch.Generator().manual_seed(1)
    shape = (len(POSITIONS), HEADS, WIDTH + 16 * is_slice)
    return [torch.randn(shape, generator=source)[:, :heads, -WIDTH:] for heads in (HEADS, 1)]


def flat(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(len(part), -1).clone()


@pytest.mark.parametrize("is_slice", [False, True])
def test_each_head_is_rotated_by_its_token_s_position(mends: Any, embedding: Any, is_slice: bool) -> None:
    """DeepSeek, GLM-4.7-Flash and LFM2 write the text that they should."""
    query, key = heads_of_tokens(is_slice)
    expected = mends.ROTARY_KERNEL(embedding, POSITIONS, flat(query), flat(key))
    rotated = mends.rotate(embedding, POSITIONS, query.clone(), key.clone())
    for part, flat_part in zip(rotated, expected, strict=True):
        torch.testing.assert_close(flat(part), flat_part)


def test_the_kernel_is_kept_where_it_is_correct(mends: Any, embedding: Any) -> None:
    """Most models lose no speed to the fix."""
    query, key = map(flat, heads_of_tokens(is_slice=False))
    rotated, _ = mends.rotate(embedding, POSITIONS, query, key)
    assert rotated is query, "the kernel works in place"


def test_the_kernel_still_rotates_heads_by_wrong_positions(mends: Any, embedding: Any) -> None:
    """Otherwise the fix costs speed for nothing."""
    query, key = heads_of_tokens(is_slice=False)
    expected, _ = mends.ROTARY_KERNEL(embedding, POSITIONS, flat(query), flat(key))
    wrong, _ = mends.ROTARY_KERNEL(embedding, POSITIONS, query, key)
    assert not torch.allclose(flat(wrong), expected), WHY


# -- Mamba 2 -------------------------------------------------------------------------------------------------------


def test_the_scan_still_returns_only_the_last_state(mends: Any) -> None:
    """Otherwise a prompt could be prefilled in fewer steps than with the fix."""
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import _mamba_chunk_scan_combined_fwd_cpu

    tokens, chunk = 96, 32
    x, dt = torch.randn(tokens, HEADS, WIDTH), torch.rand(tokens, HEADS)
    b, c = torch.randn(2, tokens, 1, 16)
    states = _mamba_chunk_scan_combined_fwd_cpu(
        x,
        dt,
        -torch.rand(HEADS),
        b,
        c,
        chunk,
        torch.empty_like(x),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        cu_chunk_seqlens=torch.arange(0, tokens + 1, chunk, dtype=torch.int32),
        return_intermediate_states=True,
    )
    assert len(states) == 1, WHY


# -- Mamba 1 -------------------------------------------------------------------------------------------------------


class Scan:
    """Two sequences of random numbers for a Mamba 1 layer."""

    DIM, STATE, STARTS = 16, 8, (0, 9, 20)

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(3)
        tokens = self.STARTS[-1]
        self.u, self.delta, self.z = (torch.randn(self.DIM, tokens, generator=source) for _ in range(3))
        self.b, self.c = (torch.randn(1, self.STATE, tokens, generator=source) for _ in range(2))
        self.a = -torch.rand(self.DIM, self.STATE, generator=source)
        self.d, self.bias = (torch.randn(self.DIM, generator=source) for _ in range(2))
        self.states = torch.full((4, self.DIM, self.STATE), torch.nan)

    def run(self, spans: Sequence[tuple[int, int]], begun: bool) -> torch.Tensor:
        """Return the output for these tokens of the two sequences, whose states are in slots 2 and 1."""
        from melld.engine.worker.vllm_on_cpu.selective_scan import selective_scan

        tokens = torch.cat([torch.arange(*span) for span in spans])
        parts = [part[..., tokens].clone() for part in (self.u, self.delta, self.b, self.c, self.z)]
        u, delta, b, c, z = parts
        starts = torch.tensor([0, spans[0][1] - spans[0][0], len(tokens)], dtype=torch.int32)
        slots = torch.tensor([2, 1], dtype=torch.int32)
        known = torch.tensor([begun, begun])
        selective_scan(u, delta, self.a, b, c, self.d, z, self.bias, True, starts, slots, known, self.states, 0)
        return z

    def expected(self) -> torch.Tensor:
        """Compute the same by the formula."""
        out = torch.empty_like(self.z)
        for first, end in zip(self.STARTS, self.STARTS[1:], strict=False):
            state = torch.zeros(self.DIM, self.STATE)
            for token in range(first, end):
                step = torch.nn.functional.softplus(self.delta[:, token] + self.bias)[:, None]
                state = state * (step * self.a).exp() + step * self.u[:, token, None] * self.b[0, :, token]
                total = state @ self.c[0, :, token] + self.d * self.u[:, token]
                out[:, token] = total * torch.nn.functional.silu(self.z[:, token])
        return out


def test_mamba_1_scans_a_prompt(mends: Any) -> None:
    """Jamba, Falcon-Mamba and Mamba run on a CPU."""
    scan = Scan()
    torch.testing.assert_close(scan.run([(0, 9), (9, 20)], begun=False), scan.expected())


def test_scan_states_do_not_depend_on_chunking(mends: Any) -> None:
    """Each sequence continues from its own state, to the last bit."""
    whole, cut = Scan(), Scan()
    out = whole.run([(0, 9), (9, 20)], begun=False)
    first, rest = cut.run([(0, 4), (9, 10)], begun=False), cut.run([(4, 9), (10, 20)], begun=True)
    assert torch.equal(torch.cat([first[:, :4], rest[:, :5], first[:, 4:], rest[:, 5:]], 1), out)
    assert torch.equal(whole.states[1:3], cut.states[1:3])
    assert whole.states[0].isnan().all(), "no other state is touched"


def test_vllm_still_has_no_such_scan(mends: Any) -> None:
    """Its own would be faster."""
    assert not hasattr(torch.ops._C, "selective_scan_fwd"), WHY


def test_linear_layers_still_need_contiguous_rows(mends: Any) -> None:
    """Otherwise Mamba 1 need not copy their input."""
    from vllm import _custom_ops as ops

    weight = torch.randn(32, 16)
    handler = ops.create_onednn_mm(weight.t(), 32)
    with pytest.raises(RuntimeError, match="stride"):
        ops.onednn_mm(handler, torch.randn(16, 8).T, None)


def test_vllm_s_kernel_still_takes_one_decay_per_head(mends: Any) -> None:
    """As in Mamba 2.  Otherwise single tokens need no fix."""
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update

    scan, slots, out = Scan(), torch.tensor([1], dtype=torch.int32), torch.empty(1, Scan.DIM)
    scan.states[1] = 0
    token = [part[..., :1] for part in (scan.u, scan.delta, scan.b[0], scan.c[0], scan.z)]
    u, delta, b, c, z = (part.T.contiguous() for part in token)
    selective_state_update(
        *(scan.states, u, delta, scan.a, b, c, scan.d, z, scan.bias, True, slots, slots),
        out=out,
    )
    assert not torch.allclose(out[0], scan.expected()[:, 0]), WHY


# -- gated delta nets ----------------------------------------------------------------------------------------------


class Net:
    """A layer of random weights, with state slots for some sequences, and the tokens that it has seen."""

    def __init__(self, columns: int = TAPS - 1) -> None:
        source = torch.Generator().manual_seed(2)
        self.weight = torch.randn(DIMENSION, TAPS, generator=source) / 2
        self.tokens, self.a, self.b = (torch.randn(40, width, generator=source) for width in (DIMENSION, HEADS, HEADS))
        self.layer = SimpleNamespace(
            prefix="layer",
            head_k_dim=WIDTH,
            head_v_dim=WIDTH,
            A_log=torch.rand(HEADS, generator=source),
            dt_bias=torch.rand(HEADS, generator=source),
            conv1d=SimpleNamespace(weight=self.weight[:, None, :], bias=None),
            activation="silu",
            kv_cache=(
                torch.full((SLOTS, columns, DIMENSION), torch.nan),
                torch.full((SLOTS, HEADS, WIDTH, WIDTH), torch.nan),
            ),
            rearrange_mixed_qkv=self.split,
        )

    @staticmethod
    def split(mixed: torch.Tensor) -> list[torch.Tensor]:
        sizes = [KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, HEADS * WIDTH]
        return [part.reshape(1, len(mixed), -1, WIDTH) for part in mixed.split(sizes, -1)]

    def run(self, first: int, end: int, function: Any, **metadata: Any) -> torch.Tensor:
        """Return the function's output for these tokens of one sequence, in one step."""
        from vllm.forward_context import ForwardContext, override_forward_context
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

        counts = ("prefills", "prefill_tokens", "decodes", "decode_tokens", "spec_decodes", "spec_decode_tokens")
        facts = {f"num_{name}": 0 for name in counts} | {"num_actual_tokens": end - first} | metadata
        context = ForwardContext(
            no_compile_layers={"layer": self.layer},
            attn_metadata={"layer": GDNAttentionMetadata(**facts)},
            slot_mapping={},
        )
        out = torch.zeros(end - first, HEADS, WIDTH)
        with override_forward_context(context):
            function(self.tokens[first:end], self.b[first:end], self.a[first:end], out, "layer")
        return out

    def prefill(self, first: int, end: int, function: Any) -> torch.Tensor:
        """Compute a part of a prompt whose state is in slot 1."""
        return self.run(
            first,
            end,
            function,
            num_prefills=1,
            num_prefill_tokens=end - first,
            non_spec_query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
            non_spec_state_indices_tensor=torch.tensor([1], dtype=torch.int32),
            has_initial_state=torch.tensor([first > 0]),
        )

    def draft(self, first: int, accepted: int, function: Any) -> torch.Tensor:
        """Compute a token and three drafted ones, whose states are in slots 1 to 4."""
        return self.run(
            first,
            first + DRAFTS + 1,
            function,
            num_spec_decodes=1,
            num_spec_decode_tokens=DRAFTS + 1,
            spec_query_start_loc=torch.tensor([0, DRAFTS + 1], dtype=torch.int32),
            spec_state_indices_tensor=torch.arange(1, DRAFTS + 2, dtype=torch.int32)[None],
            num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32),
        )

    def in_steps(self, cuts: Sequence[int], function: Any) -> torch.Tensor:
        """Return the output for all tokens when their steps end there."""
        spans = zip([0, *cuts], [*cuts, len(self.tokens)], strict=True)
        return torch.cat([self.prefill(first, end, function) for first, end in spans])


@pytest.fixture(scope="module")
def gated_delta_net(mends: Any) -> Any:
    from melld.engine.worker.vllm_on_cpu.gated_delta_net import gated_delta_net

    return gated_delta_net


def test_a_gated_delta_net_matches_transformers(gated_delta_net: Any) -> None:
    """Qwen3.5, 3.6 and Qwen3-Next run on a CPU in float32, whatever their head sizes."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    net = Net()
    padded = torch.nn.functional.pad(net.tokens.T[None], (TAPS - 1, 0))
    mixed = torch.nn.functional.conv1d(padded, net.weight[:, None, :], groups=DIMENSION)
    query, key, value = net.split(torch.nn.functional.silu(mixed[0].T))
    decay = -net.layer.A_log.exp() * torch.nn.functional.softplus(net.a + net.layer.dt_bias)
    query, key = (part.repeat_interleave(HEADS // KEY_HEADS, 2) for part in (query, key))
    expected, _ = torch_recurrent_gated_delta_rule(
        query, key, value, decay[None], net.b.sigmoid()[None], None, False, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(net.in_steps([], gated_delta_net), expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cuts", [[1], [2, 3], [20], list(range(1, 40))], ids=str)
def test_delta_net_states_do_not_depend_on_chunking(gated_delta_net: Any, cuts: list[int]) -> None:
    """A moved request computes its prompt in other steps, with the same result to the last bit."""
    assert torch.equal(Net().in_steps(cuts, gated_delta_net), Net().in_steps([], gated_delta_net))


@pytest.mark.parametrize("accepted", range(1, DRAFTS + 2))
def test_rejected_draft_tokens_leave_nothing_behind(gated_delta_net: Any, accepted: int) -> None:
    """With a drafter the text is the same as without."""
    net, start = Net(TAPS - 1 + DRAFTS), 10
    net.prefill(0, start, gated_delta_net)
    net.draft(start, 1, gated_delta_net)
    refused = net.tokens[start + accepted :].clone()
    net.tokens[start + accepted :] = refused.flip(0)  # others come instead
    first = start + accepted
    out = net.draft(first, accepted, gated_delta_net)
    assert torch.equal(out, net.in_steps([], gated_delta_net)[first : first + DRAFTS + 1])


def test_vllm_still_has_no_gated_delta_net_for_float32(mends: Any, gated_delta_net: Any) -> None:
    """Its own would be faster."""
    from melld.engine.worker.vllm_on_cpu.gated_delta_net import KERNEL

    with pytest.raises(AssertionError, match="BF16"):
        Net().in_steps([], KERNEL)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_vllm_s_kernel_still_supports_the_same_head_sizes(gated_delta_net: Any, width: int) -> None:
    """The fix replaces it where it refuses, and nowhere else."""
    from vllm import _custom_ops as ops

    from melld.engine.worker.vllm_on_cpu.gated_delta_net import KERNEL_HEADS

    heads = torch.zeros(1, 4, HEADS, width, dtype=torch.bfloat16)
    refusal = pytest.raises(RuntimeError, match="head dim") if width not in KERNEL_HEADS else contextlib.nullcontext()
    with refusal:
        ops.chunk_gated_delta_rule_cpu(
            query=heads,
            key=heads,
            value=heads,
            g=torch.zeros(1, 4, HEADS),
            beta=torch.zeros(1, 4, HEADS, dtype=torch.bfloat16),
            initial_state=torch.zeros(2, HEADS, width, width),
            output_final_state=True,
            cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=torch.tensor([1], dtype=torch.int32),
        )
