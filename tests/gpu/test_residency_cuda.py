"""One live migration between two vLLM workers on one GPU, with the runner and the kernels of the GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from melld.demo_model import make_demo_model
from tests.engine.residency_driver import WorkerProxy
from tests.engine.residency_pair import Case, Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPT = tuple(100 + 7 * i % 1500 for i in range(90))
SEEDED = {"temperature": 0.9, "seed": 11, "ignore_eos": True, "max_tokens": 60}
CASES = [
    Case("greedy", PROMPT, {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}),
    Case("seeded", PROMPT, SEEDED | {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}),
]


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tmp_path_factory.mktemp("model") / "demo"
    make_demo_model(Path(model))
    options = {"block_size": 16, "kv_cache_memory_bytes": 256 << 20, "async_scheduling": request.param}
    workers = [WorkerProxy(str(model), options) for _ in range(2)]
    try:
        for worker in workers:
            worker.receive()
        yield Pair(*workers)
    finally:
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("via", ["kv", "tokens"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_moved_request_says_what_it_would_have_said_on_a_gpu(pair: Pair, case: Case, via: str) -> None:
    """The promise of the CPU tests, with vLLM's V2 runner and a copy over CUDA IPC."""
    expected = pair.unmoved(case)
    running = pair.start(case)
    pair.step(12)
    assert pair.move(running, via) is not None
    assert [expected] == pair.finish(running)
