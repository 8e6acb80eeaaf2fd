"""GPU memory that two engines lend each other; without a GPU, memory of a test library."""

import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from melld.demo_model import make_demo_model
from melld.engine.fleet.arena import GpuArena
from tests.engine.fake_cuda import build
from tests.engine.worker.residency.driver import WorkerFailed, WorkerProxy
from tests.engine.worker.residency.pair import Pair
from tests.gpu.conftest import DEVICE
from tests.gpu.test_residency_cuda import CASES

pytestmark = pytest.mark.gpu

GRANULE_BYTES, GRANULES = 4 << 20, 80
ON_GPU = {"block_size": 16, "gpu_memory_utilization": 0.01}


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines in memory whose maker has ended, each with an eighth of it."""
    directory = tmp_path_factory.mktemp("lending")
    make_demo_model(directory / "demo")
    options: dict[str, Any] = {"kv_cache_memory_bytes": GRANULES * GRANULE_BYTES}
    uuid = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        if DEVICE == "cuda":
            import torch

            options |= ON_GPU
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        else:
            options["libcuda"] = str(build(directory))
            patch.setenv("LD_LIBRARY_PATH", str(directory))
        arena = GpuArena(uuid, GRANULES * GRANULE_BYTES, GRANULE_BYTES)
        options["arena"] = msgspec.to_builtins(arena.spec())
        workers = [WorkerProxy(str(directory / "demo"), options, subprocess.Popen) for _ in range(2)]
    try:
        for number, worker in enumerate(workers):
            worker.receive()
            worker("grant", list(range(1 + 10 * number, 11 + 10 * number)))
        yield Pair(*workers)
    finally:
        for worker in workers:
            worker.close()
        arena.close()


def test_lent_memory_changes_hands_without_changing_answers(shared_pair: Pair) -> None:
    """Blocks in use move on the device; the other's leftover data does no harm."""
    pair, (here, there) = shared_pair, (shared_pair.here, shared_pair.there)
    expected = pair.all_unmoved(CASES)
    running = [pair.start(case) for case in CASES]
    pair.step(8)
    here("take", 9, 60.0)
    pair.step(2)
    [answer] = here("returned")
    assert len(answer.granules) == 9
    there("grant", list(answer.granules))
    assert pair.finish(*running) == expected
    assert pair.finish(*(pair.start(case, there) for case in CASES)) == expected
    for worker in (here, there):
        worker("check_pool")


def test_an_engine_lives_on_in_memory_that_another_died_in(shared_pair: Pair) -> None:
    """The memory belongs neither to the maker nor to the dead worker."""
    pair, there = shared_pair, shared_pair.there
    expected = pair.finish(*(pair.start(case, there) for case in CASES))
    running = [pair.start(case, there) for case in CASES]
    pair.step(4)
    for number in range(3):
        pair.here("add", f"lost-{number}", list(CASES[0].prompt), CASES[0].params, {"cache_salt": str(number)})
    pair.here("step", 3)
    pair.here("die_at", "withheld")
    pair.here("take", 1, 60.0)
    with pytest.raises(WorkerFailed):
        pair.here("step", 200)
    answers = {one.request_id: one.answer for one in running}
    for output in there("step", 300):
        answers[output["id"]].add(output)
    assert list(answers.values()) == expected
