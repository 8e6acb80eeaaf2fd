"""Requests move between two asynchronously scheduling vLLM workers without any effect on answers.

On the CPU: see `async_on_cpu` for what that shows and what it cannot.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from melld.migrate.snapshot import MoveRefusal
from tests.engine.worker.residency.driver import Refused
from tests.engine.worker.residency.pair import Case, Pair, two_workers
from tests.engine.worker.residency.test_residency import (
    CASES,
    GREEDY,
    HALF_PREFILLED,
    LONG_PROMPT,
    PENALTIES,
    PROMPT,
    SAMPLED,
    SEEDED,
)


def name_of(value: Any) -> str:
    """Return the name of a case, or of a way."""
    return str(getattr(value, "name", value))


@pytest.fixture(scope="module")
def shared_pair(demo_model: Path) -> Iterator[Pair]:
    """Two workers with two steps in flight each."""
    with two_workers(demo_model, {"async_scheduling": True}) as workers:
        yield Pair(*workers)


HERE = (GREEDY, SAMPLED, CASES[-2])
"""In the short form by one of the two ways; `test_residency` moves each both ways."""


def by_both_ways(cases: Sequence[Any]) -> list[Any]:
    """Each with "kv" and "tokens"; in the short form with one of them, in turn."""
    ways = ("kv", "tokens")
    return [
        pytest.param(case, via, marks=() if number % 2 == turn else pytest.mark.long)
        for number, case in enumerate(cases)
        for turn, via in enumerate(ways)
    ]


def test_asynchronous_scheduling_changes_no_answer(pair: Pair, plain_pair: Pair) -> None:
    """Else comparing moved with unmoved runs here would say nothing about clients' answers so far."""
    for case, ahead, plain in zip(CASES, pair.all_unmoved(CASES), plain_pair.all_unmoved(CASES), strict=True):
        assert ahead == plain, case.name


def test_a_request_with_penalties_does_not_extend_another_s_minimum(pair: Pair) -> None:
    """vLLM's first runner would then forget tokens of the other, and `min_tokens` would hold longer."""
    (least,) = (case for case in CASES if case.name == "min_tokens")
    penalised = Case("penalised", PROMPT, SEEDED | PENALTIES)
    expected = pair.all_unmoved([least, penalised])
    first = pair.start(least)
    pair.step(15)
    assert pair.finish(first, pair.start(penalised)) == expected


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_moved_requests_give_their_unmoved_answers(pair: Pair, via: str) -> None:
    """Tokens, log-probabilities, finish reason and usage are those of the run without a move."""
    pair.check_moves([(case, via) for case in CASES], 9)


@pytest.mark.parametrize(("case", "via"), by_both_ways(HERE), ids=name_of)
def test_a_request_can_move_at_any_token(pair: Pair, case: Case, via: str) -> None:
    """There is no bad moment, though usually one token is in flight that nobody knows yet."""
    pair.check_every_move(case, via, 15)


@pytest.mark.parametrize(("steps", "via"), by_both_ways(range(5)))
def test_a_half_prefilled_request_can_move(pair: Pair, steps: int, via: str) -> None:
    """Waiting, chunks computed or under way, or just begun."""
    pair.check_move(HALF_PREFILLED, via, steps)


def test_eight_requests_move_there_and_back(pair: Pair) -> None:
    """Emptying a worker is eight moves at the same time; then they all come back."""
    expected = pair.all_unmoved(CASES[:8])
    running = [pair.start(case) for case in CASES[:8]]
    pair.step(5)
    for turn in range(2):
        for number, one in enumerate(running):
            if one.answer.finish is None:
                pair.move(one, "kv" if (number + turn) % 2 else "tokens", decode_meanwhile=number % 2)
    assert expected == pair.finish(*running)


def test_a_request_in_flight_is_not_settled(pair: Pair) -> None:
    """The token in flight is delivered here before the request is elsewhere: none is lost or repeated."""
    running = pair.start(GREEDY)
    pair.step(9)
    assert pair.here("freeze", running.request_id, "kv") == "in flight"
    told = len(running.answer.tokens)
    pair.step(1)
    assert len(running.answer.tokens) > told
    assert pair.here("stillness", running.request_id) == "settled"
    pair.here("thaw", running.request_id)
    assert [pair.unmoved(GREEDY)] == pair.finish(running)


def test_a_request_returns_once_its_last_step_is_over(pair: Pair) -> None:
    """vLLM would take that step's output for the returned request's, and deliver its token twice."""
    running = pair.start(GREEDY)
    pair.step(9)
    core_request, _ = pair.here("core_request", running.request_id)
    pair.here("abort", [running.request_id])
    told = len(running.answer.tokens)
    for come_back in ("attach_unreserved", "reserve"):
        with pytest.raises(Refused) as refused:
            pair.here(come_back, core_request, running.answer.tokens, *[0][: come_back == "reserve"])
        assert refused.value.reason is MoveRefusal.ALREADY_THERE
    pair.step(1)
    assert len(running.answer.tokens) == told
    pair.here("attach_unreserved", core_request, running.answer.tokens)
    assert [pair.unmoved(GREEDY)] == pair.finish(running)


def test_a_block_that_another_request_computes_right_now_is_not_final(pair: Pair) -> None:
    """Of two prompts with a common beginning that arrive together, the second finds the first's blocks at once."""
    case = Case("alike", LONG_PROMPT[:200], {"temperature": 0.0, "max_tokens": 8})
    first, second = (pair.start(case, salt="alike") for _ in range(2))
    pair.step(1)
    assert pair.here("facts", second.request_id).full_blocks == 0
    pair.step(1)
    assert pair.here("facts", second.request_id).full_blocks == 200 // 32
    assert [pair.unmoved(case)] * 2 == pair.finish(first, second)


@pytest.mark.parametrize("asked", [{}, {"prompt_logprobs": 2}], ids=["plain", "prompt_logprobs"])
def test_a_prompt_frozen_on_its_way_out_emits_one_token_here(pair: Pair, asked: dict[str, Any]) -> None:
    """A hand-over after the first token starts while it is computed: the second is the destination's."""
    case = Case(f"long, {asked}", LONG_PROMPT, {"temperature": 0.0, "max_tokens": 10} | asked)
    expected = pair.unmoved(case)
    running = pair.start(case)
    while pair.here("facts", running.request_id).in_prompt:
        assert not running.answer.tokens
        pair.step(1)
    snapshot = pair.move(running, decode_meanwhile=0)
    assert snapshot is not None
    assert len(snapshot.output_token_ids) == 1
    assert [expected] == pair.finish(running)
