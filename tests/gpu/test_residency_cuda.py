"""Live migrations between two vLLM workers on one GPU, with the GPU's runner and kernels."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import GPU_MODEL
from melld.demo_model import make_demo_model
from tests.engine.worker.residency.pair import Case, Pair, two_workers
from tests.gpu.conftest import DEVICE

pytestmark = pytest.mark.gpu

PROMPT = tuple(100 + 7 * i % 1500 for i in range(90))
SEEDED = {"temperature": 0.9, "seed": 11, "ignore_eos": True, "max_tokens": 60}
CASES = [
    Case("greedy", PROMPT, {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}),
    Case("seeded", PROMPT, SEEDED | {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}),
]
PLAIN = {"kv_cache_memory_bytes": 256 << 20}
"""float32, eager: what moves by its tokens, too, must say the same."""
FAST = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "enforce_eager": False,
    "kv_cache_memory_bytes": 1 << 30,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
"""A model of a usual size in bfloat16, FlashAttention, CUDA graphs: a prefill rounds otherwise than decoding does."""


def make_large_model(model: Path, layers: int = 32) -> None:
    """Write a model of a usual size, to be served with vLLM's dummy weights."""
    make_demo_model(model)
    config = model / "config.json"
    shape = GPU_MODEL | {"num_hidden_layers": layers}
    config.write_text(json.dumps(json.loads(config.read_text()) | shape))


def make_pair(model: Path, options: dict[str, Any]) -> Iterator[Pair]:
    """Make two workers on the device."""
    given = options | ({"block_size": 16, "gpu_memory_utilization": 0.1} if DEVICE == "cuda" else {})
    with two_workers(model, given, subprocess.Popen) as workers:
        yield Pair(*workers)


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def plain_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tmp_path_factory.mktemp("model") / "demo"
    make_demo_model(model)
    yield from make_pair(model, PLAIN | {"async_scheduling": request.param})


@pytest.mark.parametrize("via", ["kv", "tokens"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_moved_request_gives_its_unmoved_answer_on_a_gpu(plain_pair: Pair, case: Case, via: str) -> None:
    """The promise of the CPU tests, with vLLM's V2 runner and a copy over CUDA IPC."""
    plain_pair.check_moves([(case, via)], 12)


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def fast_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if DEVICE == "cpu":
        pytest.skip("bfloat16 and CUDA graphs need a GPU")
    model = tmp_path_factory.mktemp("model") / "large"
    make_large_model(model)
    yield from make_pair(model, FAST | {"async_scheduling": request.param})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_moved_request_continues_exactly_in_bfloat16_with_graphs(fast_pair: Pair, case: Case) -> None:
    """The usual setup: its KV is copied whole, so not a bit of the answer may change."""
    fast_pair.check_moves([(case, "kv")], 12)
