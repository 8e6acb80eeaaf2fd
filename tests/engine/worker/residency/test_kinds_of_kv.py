"""Other kinds of KV move as the demo model's does: latent vectors, eight-bit numbers, KV shared by layers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.worker.residency.pair import Case, Pair, two_workers
from tests.engine.worker.residency.test_residency import GREEDY, HALF_PREFILLED, SAMPLED
from tests.families.texts import CPU_MLA

pytestmark = pytest.mark.long
KINDS: dict[str, Any] = {
    "latent": ("deepseek_v3", CPU_MLA),
    "fp8": ("llama3", {"kv_cache_dtype": "fp8"}),
    "shared by layers": ("gemma4_e", {}),
}
HAS_AVX512 = "avx512" in Path("/proc/cpuinfo").read_text()


@pytest.fixture(scope="module", params=KINDS)
def shared_pair(model_of: Callable[[str], Path], request: Any) -> Iterator[Pair]:
    """Two workers."""
    if request.param == "fp8" and not HAS_AVX512:
        pytest.skip("vLLM's CPU attention reads fp8 by AVX-512 alone")
    name, options = KINDS[request.param]
    with two_workers(model_of(name), options) as workers:
        yield Pair(*workers)


@pytest.mark.parametrize("case", [GREEDY, SAMPLED, HALF_PREFILLED], ids=lambda case: case.name)
def test_a_request_moved_by_kv_gives_its_unmoved_answer(pair: Pair, case: Case) -> None:
    """Every byte of its blocks arrives."""
    assert len(set(pair.unmoved(case).tokens)) > 5
    pair.check_move(case, "kv", 2 if case is HALF_PREFILLED else 9)


def test_a_request_moved_by_tokens_gives_its_unmoved_answer(pair: Pair) -> None:
    """Another worker recomputes its prompt and its answer so far."""
    running = pair.start(GREEDY)
    pair.step(9)
    pair.move(running, "tokens")
    (answer,) = pair.finish(running)
    assert answer == pair.unmoved(GREEDY)


def test_without_the_copy_the_answer_differs(pair: Pair) -> None:
    """The tests above would notice."""
    expected = pair.unmoved(GREEDY)
    running = pair.start(GREEDY)
    pair.step(9)
    pair.there("reserve", *pair.here("core_request", running.request_id), 0)
    assert pair.here("freeze", running.request_id, "kv") == "settled"
    pair.there("attach", pair.here("snapshot", running.request_id), "kv")
    running.home = pair.there
    pair.here("release", running.request_id)
    assert pair.finish(running) != [expected]
