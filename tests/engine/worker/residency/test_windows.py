"""Sliding-window models: windows keep only the latest blocks, and move that way."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from melld.kvstore.geometry import KvGeometry
from melld.migrate.snapshot import CopyPlan, MoveRefusal
from tests.engine.worker.residency.driver import Refused
from tests.engine.worker.residency.pair import Case, Pair, two_workers
from tests.engine.worker.residency.test_residency import GREEDY, HALF_PREFILLED, LONG_PROMPT, SAMPLED
from tests.families.family import CHUNK, WINDOW

BLOCK = 32
CALM = {"temperature": 0.0, "ignore_eos": True}
LONG = Case("far beyond the window", LONG_PROMPT, CALM | {"max_tokens": 48})


@pytest.fixture(
    scope="module",
    params=["gemma3_small", *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma3", "gemma4", "llama4"))],
)
def shared_pair(model_of: Callable[[str], Path], request: Any) -> Iterator[Pair]:
    """Two workers: some layers see everything, others the last 64 tokens, or a chunk of 128.

    The blocks of Gemma 4's groups are of unequal numbers of tokens.
    """
    with two_workers(model_of(request.param), {}) as workers:
        pair = Pair(*workers)
        groups = pair.here("groups")
        assert {group.window for group in groups} == {0, CHUNK if request.param == "llama4" else WINDOW}
        assert len({group.block_tokens for group in groups}) == (2 if request.param == "gemma4" else 1)
        yield pair


@pytest.fixture(scope="module")
def geometry(shared_pair: Pair) -> KvGeometry:
    return KvGeometry(BLOCK, 1, shared_pair.here("groups"))


def real_blocks(groups: Any) -> list[int]:
    """Return how many real blocks each group has."""
    return [sum(block != 0 for block in group) for group in groups]


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_moved_requests_give_their_unmoved_answers(pair: Pair, via: str) -> None:
    """Within and beyond the window."""
    pair.check_moves([(case, via) for case in (GREEDY, SAMPLED, LONG)], 9)


@pytest.mark.parametrize("via", ["kv", pytest.param("tokens", marks=pytest.mark.long)])
def test_a_request_can_move_at_any_token(pair: Pair, via: str) -> None:
    """Its window begins within blocks, and at their edges."""
    pair.check_every_move(GREEDY, via, 13)


@pytest.mark.parametrize("via", ["kv", pytest.param("tokens", marks=pytest.mark.long)])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_half_prefilled_request_can_move(pair: Pair, steps: int, via: str) -> None:
    """The remaining prompt needs the window of the computed part."""
    pair.check_move(HALF_PREFILLED, via, steps)


def test_nothing_is_reserved_or_copied_behind_a_window(pair: Pair, geometry: KvGeometry) -> None:
    """A long request takes little more room than its full-attention layers need."""
    running = pair.start(LONG)
    pair.step(5)
    facts = pair.here("facts", running.request_id)
    words = pair.here("core_request", running.request_id)
    reservation = pair.there("reserve", *words, 0, facts.num_computed_tokens)
    assert sum(real_blocks(reservation.block_ids)) <= geometry.blocks_for_tokens(facts.num_tokens)
    for group, blocks in zip(geometry.groups, real_blocks(facts.full_block_ids), strict=True):
        full = facts.num_computed_tokens // group.block_tokens
        assert 0 < blocks <= -(-group.window // group.block_tokens) < full if group.window else blocks == full
    pair.there("cancel", running.request_id)
    pair.finish(running)


def test_the_report_counts_the_allocated_blocks(pair: Pair, geometry: KvGeometry) -> None:
    """The ledger's sums agree with vLLM's pool, at every step and on both sides of a move; none is overestimated."""
    running = [pair.start(LONG), pair.start(GREEDY)]
    for number in range(50):
        pair.step()
        if number in (20, 40):
            pair.move(running[0], "kv", decode_meanwhile=0)
        for worker in (pair.here, pair.there):
            worker("forget_report")
            report = worker("report")
            assert sum(facts[0] for facts in report.changed.values()) == report.used_blocks
            assert report.shared_blocks == 0
            for name, (blocks, _) in report.changed.items():
                facts = worker("facts", name)
                if facts.num_computed_tokens > facts.num_prompt_tokens:  # a prompt's parts are freed by the next step
                    assert blocks <= geometry.blocks_for_tokens(facts.num_tokens)
    pair.finish(*running)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_request_preempted_during_a_move_answers_the_same(pair: Pair, steps: int) -> None:
    """Recomputing it needs windows that have no room yet: it stays where it is."""
    expected = pair.unmoved(LONG)
    running = pair.start(LONG)
    pair.step(9)
    name = running.request_id
    facts = pair.here("facts", name)
    reservation = pair.there("reserve", *pair.here("core_request", name), 0, facts.num_computed_tokens)
    pair.here("push_out", name)
    pair.step(steps)
    if steps == 3:  # all of it is computed again
        pair.complete(running, CopyPlan(reservation))
    else:
        with pytest.raises(Refused) as refused:
            pair.complete(running, CopyPlan(reservation))
        assert refused.value.reason == MoveRefusal.PREEMPTED
        pair.there("cancel", name)
        pair.here("thaw", name)
    assert [expected] == pair.finish(running)


def test_blocks_behind_a_window_do_not_count_as_cached(pair: Pair) -> None:
    """Blocks that fell behind the window during the move were never filled: nobody is answered from them."""
    running = pair.start(Case("longer", LONG_PROMPT, CALM | {"max_tokens": 180}), salt="poisoned")
    pair.step(8)
    pair.move(running, "kv", decode_meanwhile=4 * BLOCK)
    pair.finish(running)
    cases = [
        Case(f"{more} tokens more", LONG_PROMPT + tuple(running.answer.tokens[:more]), CALM | {"max_tokens": 8})
        for more in (0, 3 * BLOCK, 5 * BLOCK)
    ]
    assert [*pair.finish(*(pair.start(case, pair.there, salt="poisoned") for case in cases))] == pair.all_unmoved(cases)


def test_a_dead_worker_s_request_resumes_from_the_log(pair: Pair) -> None:
    """Prompt and tokens so far are enough."""
    cases = (LONG, SAMPLED)
    assert pair.all_resumed_from_the_log(cases) == pair.all_unmoved(cases)


def test_the_text_depends_on_what_the_windows_keep(pair: Pair) -> None:
    """Without a copy the answer differs: the tests above would notice."""
    expected = pair.unmoved(LONG)
    running = pair.start(LONG)
    pair.step(9)
    facts = pair.here("facts", running.request_id)
    pair.there("reserve", *pair.here("core_request", running.request_id), 0, facts.num_computed_tokens)
    assert pair.here("freeze", running.request_id, "kv") == "settled"
    pair.there("attach", pair.here("snapshot", running.request_id), "kv")
    running.home = pair.there
    pair.here("release", running.request_id)
    assert pair.finish(running) != [expected]
