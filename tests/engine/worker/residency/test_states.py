"""Layers that keep a state instead of KV: it moves with the request and is never confused with another's."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from melld.kvstore.geometry import KvGeometry
from melld.migrate.snapshot import CopyPlan, MoveRefusal, RequestSnapshot
from tests.engine.worker.residency.driver import Answer, Refused
from tests.engine.worker.residency.pair import Case, Pair, two_workers
from tests.engine.worker.residency.test_residency import CASES, GREEDY, HALF_PREFILLED, LONG_PROMPT, SAMPLED

CALM = {"temperature": 0.0, "ignore_eos": True}
MOST_TOKENS = 140
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba 2": ("granite4_h_small", {}),
    "without a prefix cache": ("granite4_h_small", {"enable_prefix_caching": False}),
    "and experts": ("granite4_h", {}),
    "steps below a block": ("granite4_h", {"block_size": 512}),
    "gated delta nets": ("qwen3_next", {}),
    "short convolutions": ("lfm2", {}),
    "Mamba 1": ("jamba", {}),
    "beside attention in each layer": ("falcon_h1", {}),
}
OFTEN, ALSO = "Mamba 2", "without a prefix cache"
OF_BOTH = ("test_moved_requests_give_their_unmoved_answers",)
"""In the short form, what is tried without a prefix cache too."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on workers of each kind."""
    often = (OFTEN, ALSO) if metafunc.definition.name in OF_BOTH else (OFTEN,)
    kinds = [kind if kind in often else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
    metafunc.parametrize("shared_pair", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def shared_pair(model_of: Callable[[str], Path], request: Any) -> Iterator[Pair]:
    """Two workers."""
    name, options = KINDS[request.param]
    with two_workers(model_of(name), options) as workers:
        yield Pair(*workers)


@pytest.fixture
def pair(pair: Pair) -> Pair:
    """The pair, with free blocks spoiled so that none holds the right data by chance."""
    pair.spoil()
    return pair


def are_nearly_equal(answer: Answer, unmoved: Answer) -> bool:
    """Return True if equal up to rounding: some layers sum a prompt differently from single tokens."""
    for ours, theirs in ((answer.logprobs, unmoved.logprobs), (answer.prompt_logprobs, unmoved.prompt_logprobs)):
        if len(ours) != len(theirs) or not np.allclose(ours, theirs, atol=1e-3):
            return False
    return answer == replace(unmoved, logprobs=answer.logprobs, prompt_logprobs=answer.prompt_logprobs)


def block_tokens(pair: Pair) -> int:
    """Return the tokens in an attention block."""
    return int(next(group.block_tokens for group in pair.here("groups") if not group.keeps_state))


@pytest.fixture
def long(pair: Pair) -> Case:
    """A request whose answer goes over several blocks, unless they are large."""
    return Case(
        "over several blocks", LONG_PROMPT, CALM | {"max_tokens": min(2 * block_tokens(pair) + 12, MOST_TOKENS)}
    )


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_moved_requests_give_their_unmoved_answers(pair: Pair, via: str) -> None:
    """Tokens, log-probabilities, finish reason and usage are those of the run without a move."""
    assert len(set(pair.unmoved(GREEDY).tokens)) > 5
    pair.check_moves([(case, via) for case in CASES], 9, operator.eq if via == "kv" else are_nearly_equal)


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_a_request_can_move_at_any_token(pair: Pair, via: str) -> None:
    """Even where a block of text ends and the state moves to another."""
    pair.check_every_move(GREEDY, via, 13)


@pytest.mark.parametrize("via", ["kv", "tokens"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_half_prefilled_request_can_move(pair: Pair, steps: int, via: str) -> None:
    """Its state is that of the computed part."""
    pair.check_move(HALF_PREFILLED, via, steps)


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_a_request_may_outgrow_several_blocks_during_a_move(pair: Pair, long: Case, via: str) -> None:
    """Whatever was reserved for it, the state is that of the last token."""
    expected = pair.unmoved(long)
    running = pair.start(long)
    pair.step(6)
    pair.spoil()
    pair.move(running, via, decode_meanwhile=block_tokens(pair) * 3 // 2)
    assert [expected] == pair.finish(running)


def test_repeated_moves_leave_no_trace(pair: Pair, long: Case) -> None:
    """A request that comes back under its id does not resume from where it once was."""
    expected = pair.all_unmoved([SAMPLED, long])
    running = [pair.start(SAMPLED), pair.start(long)]
    for via in ("kv", "tokens", "kv", "kv", "tokens"):
        pair.step(3)
        for one in running:
            assert pair.move(one, via, decode_meanwhile=1) is not None
    assert expected == pair.finish(*running)


@pytest.mark.parametrize(
    ("shared", "via"),
    [
        (330, "kv"),
        (699, "tokens"),
        *(pytest.param(*row, marks=pytest.mark.long) for row in ((699, "kv"), (330, "tokens"))),
    ],
)
def test_a_prefix_cached_at_the_destination_is_used(pair: Pair, long: Case, via: str, shared: int) -> None:
    """With the state after it, and only if that is cached; afterwards others find what was moved."""
    expected = pair.unmoved(long)
    salt = f"shared {via} {shared}"
    pair.finish(pair.start(Case("before", LONG_PROMPT[:shared], CALM | {"max_tokens": 1}), pair.there, salt=salt))
    running = pair.start(long, salt=salt)
    pair.step(6)
    pair.move(running, via, decode_meanwhile=block_tokens(pair) + 3)
    assert [expected] == pair.finish(running)
    tokens = len(expected.tokens)
    longer = [LONG_PROMPT + tuple(expected.tokens[:more]) for more in (0, tokens // 3, 2 * tokens // 3, tokens - 1)]
    cases = [Case(f"{len(prompt)} tokens", prompt, CALM | {"max_tokens": 8}) for prompt in longer]
    assert pair.finish(*(pair.start(case, pair.there, salt=salt) for case in cases)) == pair.all_unmoved(cases)


def test_requests_arriving_between_two_steps_do_not_spoil_each_other(pair: Pair, long: Case) -> None:
    """One's blocks are cleared before use, and another's, which are already filled, are not."""
    cases = [long, SAMPLED, GREEDY]
    expected = pair.all_unmoved(cases)
    running = [pair.start(case) for case in cases]
    pair.step(9)
    pair.spoil()
    for one in running:
        pair.move(one, "kv", decode_meanwhile=0)
    assert expected == pair.finish(*running)


@pytest.mark.parametrize("via", ["kv", pytest.param("tokens", marks=pytest.mark.long)])
def test_a_cancelled_move_leaves_the_request_unchanged(pair: Pair, long: Case, via: str) -> None:
    """Its state is where it was, and the destination's blocks are free."""
    expected = pair.all_unmoved([SAMPLED, long])
    running = [pair.start(SAMPLED), pair.start(long)]
    pair.step(10)
    for one in running:
        pair.there("reserve", *pair.here("core_request", one.request_id), 1000)
        assert pair.here("freeze", one.request_id, via) == "settled"
    pair.step(3)
    for one in running:
        pair.there("cancel", one.request_id)
        pair.here("thaw", one.request_id)
    assert expected == pair.finish(*running)


@pytest.mark.parametrize("is_computed_again", [False, True])
def test_a_request_preempted_during_a_move_answers_the_same(pair: Pair, long: Case, is_computed_again: bool) -> None:
    """Until it is recomputed there is no state to copy: it stays where it is."""
    expected = pair.unmoved(long)
    running = pair.start(long)
    pair.step(9)
    name = running.request_id
    facts = pair.here("facts", name)
    reservation = pair.there("reserve", *pair.here("core_request", name), 0, facts.num_computed_tokens)
    pair.here("push_out", name)
    pair.spoil()
    pair.step()
    if is_computed_again:
        while pair.here("facts", name).num_computed_tokens < facts.num_computed_tokens:
            pair.step()
        pair.complete(running, CopyPlan(reservation))
    else:
        with pytest.raises(Refused) as refused:
            pair.complete(running, CopyPlan(reservation))
        assert refused.value.reason == MoveRefusal.PREEMPTED
        pair.there("cancel", name)
        pair.here("thaw", name)
    assert [expected] == pair.finish(running)


def test_the_report_counts_the_allocated_blocks(pair: Pair, long: Case) -> None:
    """The ledger's sums agree with vLLM's pool at every step and on both sides of a move; none is overestimated."""
    geometry = KvGeometry(1, 1, pair.here("groups"))
    running = [pair.start(long), pair.start(GREEDY)]
    for number in range(70):
        pair.step()
        if number in (20, 40, 60):
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


def test_a_reservation_takes_one_block_for_each_state(pair: Pair, long: Case) -> None:
    """Whatever room for growth it has."""
    running = pair.start(long)
    pair.step(9)
    name, groups = running.request_id, pair.here("groups")
    facts = pair.here("facts", name)
    reservation = pair.there("reserve", *pair.here("core_request", name), 0, facts.num_computed_tokens)
    grown = pair.there("grow", name, 1500)
    for group, before, after in zip(groups, reservation.block_ids, grown.block_ids, strict=True):
        if group.keeps_state:
            assert len(before) == 1
            assert before == after
    blocks = sum(len(ids) for ids in grown.block_ids)
    state = pair.there("state")
    assert state["total_blocks"] - state["free_blocks"] == blocks
    pair.there("cancel", name)
    pair.finish(running)


def test_a_dead_worker_s_requests_resume_from_the_log(pair: Pair, long: Case) -> None:
    """Prompt and tokens so far are enough."""
    cases = (long, SAMPLED)
    assert pair.all_resumed_from_the_log(cases) == pair.all_unmoved(cases)


def test_the_text_depends_on_the_state(pair: Pair, long: Case) -> None:
    """Moved without it, but with all KV, the answer differs: the tests above would notice."""
    expected = pair.unmoved(long)
    running = pair.start(long)
    pair.step(9)
    facts, groups = pair.here("facts", running.request_id), pair.here("groups")
    assert [not ids for ids in facts.full_block_ids] == [group.keeps_state for group in groups]
    reservation = pair.there("reserve", *pair.here("core_request", running.request_id), 0, facts.num_computed_tokens)
    assert pair.here("freeze", running.request_id, "kv") == "settled"
    raw = pair.here("snapshot", running.request_id)
    snapshot = msgspec.msgpack.decode(raw, type=RequestSnapshot)
    kv = tuple(() if group.keeps_state else ids for group, ids in zip(groups, snapshot.block_ids, strict=True))
    pair.copy(CopyPlan(reservation), reservation, pair.here, pair.there, kv, snapshot.block_epoch)
    pair.there("attach", raw, "kv")
    running.home = pair.there
    pair.here("release", running.request_id)
    assert pair.finish(running) != [expected]
