"""Prefill and decoding share a worker's time: what one gets the other does not."""

import pytest

from melld.simulator.running import PREFILL_CHUNK_TOKENS
from tests.simulator.setups import SMALL, one_by_one
from tests.simulator.test_simulation import simulate

STEP_S, TOKEN_S = 0.02, 0.0001  # of `SMALL`


def test_a_prompt_beside_decodes_includes_their_steps() -> None:
    """Each of its chunks is computed in one step with the decodes, and lasts longer by that step."""
    alone = simulate("best-fit", SMALL, one_by_one((1.1, 1000, 1)))
    beside = simulate("best-fit", SMALL, one_by_one((0.1, 10, 400), (1.1, 1000, 1)))
    chunk_s = PREFILL_CHUNK_TOKENS * TOKEN_S
    assert alone.ttft_s.mean == pytest.approx(0.1)
    assert 2 * beside.ttft_s.mean - 10 * TOKEN_S == pytest.approx(0.1 * (1 + STEP_S / chunk_s))


def test_no_time_is_counted_twice() -> None:
    """A request that decodes beside others' prompts ends later by all the time that they took."""
    prompts = 50
    load = one_by_one((0.1, 10, 1001), *((1.1 + 0.2 * number, 500, 1) for number in range(prompts)))
    report = simulate("best-fit", SMALL, load)
    assert report.gpu_seconds >= 1000 * STEP_S + prompts * 500 * TOKEN_S
    assert report.itl_s.p99 == pytest.approx(STEP_S + prompts * 500 * TOKEN_S / 1000, rel=1e-3)
