"""A prompt under way holds up nobody: what a step computes, on real vLLM workers."""

import time
from collections.abc import Iterator

import pytest

from tests.engine.worker.residency.pair import Case, Pair, Running
from tests.engine.worker.residency.test_residency import GREEDY, SAMPLED, crowded

LONG = Case(
    "1,400 tokens", tuple(300 + 13 * i % 1500 for i in range(1400)), {"temperature": 0.0, "max_tokens": 4}
)  # six steps of 256
LONG_RUN = Case(LONG.name, LONG.prompt, GREEDY.params)
OTHER = Case("1,200 tokens", tuple(90 + 17 * i % 1900 for i in range(1200)), LONG.params)
TARGET = (0.06, 0.03, 0.001, 0.00025)
"""60 ms for steps of 30 ms, 1 ms a decode and 0.25 ms a prompt token: 116 tokens beside one decode."""
SLOW = (60.0, 0.03, 0.001, 0.01)
"""10 ms a prompt token: LONG takes 14 s, and is due 56 s after it has come."""


@pytest.fixture
def pair(plain_pair: Pair) -> Iterator[Pair]:
    """Both workers without a target."""
    with plain_pair.emptied():
        yield plain_pair
        plain_pair.there("aim", None)


def tokens_of_each_step(pair: Pair, running: Running, steps: int) -> list[int]:
    """Return how many tokens the request emits in each of the next steps."""
    news = []
    for _ in range(steps):
        before = len(running.answer.tokens)
        pair.step()
        news.append(len(running.answer.tokens) - before)
    return news


@pytest.mark.parametrize("target", [(None,), TARGET], ids=["no target", "target"])
@pytest.mark.parametrize(("case", "prompts"), [(GREEDY, 2), (SAMPLED, 1)], ids=["two prompts", "one prompt, sampled"])
def test_a_moved_request_resumes_at_once_beside_long_prompts(
    pair: Pair, case: Case, prompts: int, target: tuple[float, ...]
) -> None:
    """From the first step on its client waits for no chunk of any prompt; and all tokens are right."""
    expected = pair.all_unmoved([case, LONG, OTHER])
    pair.there("aim", *target)
    running = pair.start(case)
    pair.step(9)
    others = [pair.start(one, pair.there) for one in (LONG, OTHER)[:prompts]]
    pair.step(2)
    pair.move(running, decode_meanwhile=0)
    pair.there("take_counts")
    assert tokens_of_each_step(pair, running, 4) == [1, 1, 1, 1]
    first, *later = pair.there("take_counts")
    assert sum(first) == 1 + 1  # the prompt that runs
    assert min(tokens for _, tokens in later) > 100
    assert not any(other.answer.tokens for other in others)
    assert expected[: 1 + prompts] == pair.finish(running, *others)


def test_without_a_target_a_prompt_loses_only_what_others_decode(pair: Pair) -> None:
    """No first token is delayed for a pace that nobody asked for."""
    decoding = pair.start(GREEDY, pair.there)
    pair.step(3)
    pair.there("take_counts")
    prompt = pair.start(LONG, pair.there)
    pair.step(3)
    assert pair.there("take_counts") == [(1, 255)] * 3
    pair.finish(decoding, prompt)


def test_prompts_get_the_time_that_the_target_leaves(pair: Pair) -> None:
    """Beside one decode (60 - 30 - 1) ms, at 0.25 ms a token; with no decodes, twice what was measured."""
    expected = pair.all_unmoved([GREEDY, LONG, OTHER])
    pair.there("aim", *TARGET)
    decoding = pair.start(GREEDY, pair.there)
    pair.step(3)
    pair.there("take_counts")
    prompts = [pair.start(one, pair.there) for one in (LONG, OTHER)]
    assert tokens_of_each_step(pair, decoding, 20) == [1] * 20
    steps_ms = [30 + decodes + tokens / 4 for decodes, tokens in pair.there("take_counts")]
    assert [59 <= step_ms <= 60.5 for step_ms in steps_ms] == [True] * 20, steps_ms
    answers = pair.finish(decoding, *prompts)
    assert expected == answers
    alone = pair.start(OTHER, pair.there)
    pair.there("take_counts")
    pair.step(2)
    assert pair.there("take_counts") == [(0, 240), (0, 240)]
    pair.finish(alone)


def test_a_prompt_only_step_ends_soon(pair: Pair) -> None:
    """A new arrival waits for its end: half a second, a quarter of the target, at 30 ms and 5 ms a token."""
    pair.there("aim", 0.06, 0.03, 0.001, 0.005)
    prompt = pair.start(LONG, pair.there)
    pair.there("take_counts")
    pair.step(3)
    steps_ms = [30 + 5 * tokens for _, tokens in pair.there("take_counts")]
    assert [490 <= step_ms <= 500 for step_ms in steps_ms] == [True] * 3, steps_ms
    pair.finish(prompt)


def test_a_slice_before_a_move_is_sized_by_its_own_time(pair: Pair) -> None:
    """Five blocks at 0.24 ms a token lengthen a step by 40 ms, even where the step itself takes three times as long."""
    running, decoding = pair.start(LONG_RUN), pair.start(GREEDY, pair.there)
    pair.step(8)
    pair.there("aim", 60.0, 0.12, 0.001, 0.00024)
    assert pair.there("warm", *pair.here("core_request", running.request_id))
    pair.there("take_counts")
    pair.step(4)
    assert pair.there("take_counts") == [(1, 160)] * 4
    pair.there("abort", [running.request_id])
    pair.finish(running, decoding)


def test_a_target_that_is_too_tight_still_lets_prompts_finish(pair: Pair) -> None:
    """64 tokens a step, however little time there is."""
    pair.there("aim", 0.001, *TARGET[1:])
    decoding = pair.start(GREEDY, pair.there)
    pair.step(3)
    pair.there("take_counts")
    prompt = pair.start(LONG, pair.there)
    pair.step(4)
    assert pair.there("take_counts") == [(1, 64)] * 4
    pair.finish(decoding, prompt)


def test_a_slow_model_is_held_to_twice_its_lone_step(pair: Pair) -> None:
    """Twice the 31 ms of a lone step leave 31 ms for prompts, whatever shorter time is promised."""
    pair.there("aim", 0.001, *TARGET[1:], 2.0)
    decoding = pair.start(GREEDY, pair.there)
    pair.step(3)
    pair.there("take_counts")
    prompt = pair.start(LONG, pair.there)
    pair.step(4)
    assert all(122 <= tokens <= 126 for _, tokens in pair.there("take_counts"))
    pair.finish(decoding, prompt)


def test_a_prompt_is_cut_for_a_request_that_is_about_to_arrive(pair: Pair) -> None:
    """Else its first token here would wait for a whole step of the prompt."""
    pair.there("aim", *TARGET)
    running = pair.start(GREEDY)
    pair.step(5)
    prompt = pair.start(LONG, pair.there)
    pair.step()
    pair.there("reserve", *pair.here("core_request", running.request_id), 0)
    pair.there("take_counts")
    pair.step()
    assert pair.there("take_counts") in ([(0, 119)], [(0, 120)])
    pair.there("abort", [running.request_id])
    pair.finish(running, prompt)


def test_the_operator_s_limit_holds_and_urgent_prompts_go_first(pair: Pair) -> None:
    """`long_prefill_token_threshold` lets several prompts run at once; the lowest priority number is first."""
    decoding = pair.start(GREEDY, pair.there)
    pair.step(3)
    pair.there("limit_prompts", 40)
    pair.there("take_counts")
    first = pair.start(LONG, pair.there)
    pair.there("add", "urgent", list(OTHER.prompt), OTHER.params, {"priority": -1, "cache_salt": "urgent"})
    urgent = pair.live["urgent"] = Running(OTHER, "urgent", pair.there)
    pair.step(2)
    assert pair.there("take_counts") == [(1, 80), (1, 80)]
    pair.there("limit_prompts", 0)
    pair.step()
    assert [pair.there("facts", one.request_id).num_computed_tokens for one in (first, urgent)] == [80, 80 + 255]
    pair.finish(decoding, first, urgent)


def test_a_short_prompt_does_not_wait_for_a_long_one(pair: Pair) -> None:
    """It overtakes long prompts, queued or running, as these are due later, and changes none of their tokens."""
    expected = pair.all_unmoved([LONG, OTHER, GREEDY])
    pair.there("aim", *SLOW)
    others = [pair.start(one, pair.there) for one in (LONG, OTHER)]
    pair.step(2)
    question = pair.start(GREEDY, pair.there)
    assert tokens_of_each_step(pair, question, 2) == [1, 1]
    assert not any(other.answer.tokens for other in others)
    assert expected == pair.finish(*others, question)


def test_a_long_prompt_is_computed_in_time(pair: Pair) -> None:
    """Others overtake it only while they are due earlier; once it is late, it is next."""
    pair.there("aim", *SLOW)
    for name, waited_s, is_first in (("book", 30.0, True), ("late book", 50.0, False)):
        options = {"arrival_time": time.time() - waited_s, "cache_salt": name}
        pair.there("add", name, list(LONG.prompt), LONG.params, options)
        book = pair.live[name] = Running(LONG, name, pair.there)
        other, answered = pair.start(OTHER, pair.there), []
        while len(answered) < 2:
            pair.step()
            answered += [one for one in (book, other) if one.answer.tokens and one not in answered]
        assert answered == [book, other] if is_first else [other, book]
        pair.finish(book, other)


def test_a_late_long_prompt_is_not_computed_last(pair: Pair) -> None:
    """It gets a new due time: later arrivals wait for it."""
    pair.there("aim", *SLOW)
    options = {"arrival_time": time.time() - 1000.0, "cache_salt": "book"}
    pair.there("add", "book", list(LONG.prompt), LONG.params, options)
    book = pair.live["book"] = Running(LONG, "book", pair.there)
    others = [pair.start(OTHER, pair.there) for _ in range(2)]
    while not book.answer.tokens:
        pair.step()
        assert not any(other.answer.tokens for other in others) or book.answer.tokens
    pair.finish(book, *others)


def test_computed_blocks_of_earlier_arrivals_are_kept(pair: Pair) -> None:
    """When blocks run out, the latest arrival waits, however long the first one's prompt was."""
    first = Case("grows from 4 blocks to 6", LONG.prompt[:100], GREEDY.params | {"max_tokens": 80})
    later = Case("grows from 2 blocks to 5", LONG.prompt[:40], GREEDY.params | {"max_tokens": 100})
    pair.here("aim", *SLOW)
    preempted = pair.preemptions
    with crowded(pair):  # 15 blocks are left
        kept = pair.start(first)
        pair.step()
        others = [pair.start(later) for _ in range(3)]
        assert tokens_of_each_step(pair, kept, 79) == [1] * 79
        pair.finish(*others)
    assert pair.preemptions > preempted
    pair.here("aim", None)


def test_an_urgent_prompt_goes_first(pair: Pair) -> None:
    """It overtakes prompts, queued or running, and changes none of their tokens."""
    expected = [pair.unmoved(one) for one in (LONG, OTHER, GREEDY)]
    others = [pair.start(one, pair.there) for one in (LONG, OTHER)]
    pair.step(2)
    urgent = pair.start(GREEDY, pair.there, priority=-1)
    assert tokens_of_each_step(pair, urgent, 2) == [1, 1]
    assert not any(other.answer.tokens for other in others)
    assert expected == pair.finish(*others, urgent)
