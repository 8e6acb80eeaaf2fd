"""Requests move between two real vLLM workers without any effect on answers."""

import contextlib
import random
from collections.abc import Iterator

import pytest

from melld.migrate.snapshot import CopyPlan, MoveRefusal, RequestSnapshot
from tests.engine.worker.residency.driver import Refused
from tests.engine.worker.residency.pair import Case, Pair

PROMPT = tuple(100 + 7 * i % 1500 for i in range(90))
LONG_PROMPT = tuple(200 + 11 * i % 1700 for i in range(700))  # three steps of 256 tokens
SEEDED = {"temperature": 0.9, "seed": 11, "ignore_eos": True, "max_tokens": 28}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "maximum": 999}},
    "required": ["name", "size"],
    "additionalProperties": False,
}

GREEDY = Case("greedy", PROMPT, {"temperature": 0.0, "max_tokens": 44, "ignore_eos": True})
SAMPLED = Case("seeded sampling with penalties", PROMPT, SEEDED | PENALTIES)
CASES = [
    GREEDY,
    SAMPLED,
    Case(
        "top-k, top-p, min-p and a bias",
        PROMPT,
        SEEDED | {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "logit_bias": {9: 3}},
    ),
    Case("logprobs", PROMPT, SEEDED | {"logprobs": 5}),
    Case("prompt logprobs", PROMPT, SEEDED | {"prompt_logprobs": 2}),
    Case(
        "min_tokens",
        PROMPT,
        {"temperature": 0.0, "max_tokens": 44, "min_tokens": 24, "stop_token_ids": list(range(0, 2048, 2))},
    ),
    Case("bad words and allowed tokens", PROMPT, SEEDED | {"allowed_token_ids": list(range(300, 900))}),
    Case("json schema", PROMPT, {"temperature": 1.0, "seed": 5, "max_tokens": 44, "json": SCHEMA}),
    Case("regex", PROMPT, {"temperature": 1.0, "seed": 6, "max_tokens": 44, "regex": "([a-f]{3}-){8}[0-9]{10}"}),
]


HALF_PREFILLED = Case("long and sampled", LONG_PROMPT, SEEDED | PENALTIES | {"max_tokens": 10})


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_moved_requests_give_their_unmoved_answers(pair: Pair, via: str) -> None:
    """Tokens, log-probabilities, finish reason and usage are those of the run without a move."""
    pair.check_moves([(case, via) for case in CASES], 9)


@pytest.mark.parametrize("via", ["kv", "tokens"])
@pytest.mark.parametrize("case", [GREEDY, SAMPLED, CASES[-2]], ids=lambda case: case.name)
def test_a_request_can_move_at_any_token(pair: Pair, case: Case, via: str) -> None:
    """There is no bad moment: block edges, the first and the last token included."""
    pair.check_every_move(case, via, 13)


@pytest.mark.parametrize("via", ["kv", "tokens"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_half_prefilled_request_can_move(pair: Pair, steps: int, via: str) -> None:
    """A long prompt does not pin a request to its worker: waiting, one chunk in, two chunks in, or just begun."""
    pair.check_move(HALF_PREFILLED, via, steps)


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_a_moved_request_keeps_no_more_room_than_an_unmoved_one(pair: Pair, via: str) -> None:
    """Room reserved for growth during the move is free again."""
    running = pair.start(GREEDY)
    pair.step(9)
    stayed = pair.here("block_table_sizes")
    pair.move(running, via, decode_meanwhile=0)
    assert pair.there("block_table_sizes") == stayed
    pair.finish(running)


def test_repeated_moves_leave_no_trace(pair: Pair) -> None:
    """A request that is packed over and over, there and back, is still the same request."""
    expected = pair.unmoved(SAMPLED)
    running = pair.start(SAMPLED)
    for via in ("kv", "tokens", "kv", "kv", "tokens"):
        pair.step(3)
        assert pair.move(running, via, decode_meanwhile=1) is not None
    pair.move(running, "kv", decode_meanwhile=0)
    pair.move(running, "kv", decode_meanwhile=0)
    assert [expected] == pair.finish(running)


def test_eight_requests_move_at_once(pair: Pair) -> None:
    """Emptying a worker is eight moves at the same time, each of which is exact."""
    expected = pair.all_unmoved(CASES[:8])
    running = [pair.start(case) for case in CASES[:8]]
    pair.step(12)
    for number, one in enumerate(running):
        pair.move(one, "kv" if number % 2 else "tokens", decode_meanwhile=1)
    assert expected == pair.finish(*running)


def test_a_cancelled_move_leaves_the_request_unchanged(pair: Pair) -> None:
    """A destination that dies or refuses costs the client only a step or two."""
    expected = pair.all_unmoved([SAMPLED, CASES[7]])
    running = [pair.start(case) for case in (SAMPLED, CASES[7])]
    pair.step(10)
    for one in running:
        core_request, tokens = pair.here("core_request", one.request_id)
        pair.there("reserve", core_request, tokens, 500)
        assert pair.here("freeze", one.request_id, "kv") == "settled"
    pair.step(3)
    for one in running:
        pair.there("cancel", one.request_id)
        pair.here("thaw", one.request_id)
    assert expected == pair.finish(*running)


@pytest.mark.parametrize("case", [SAMPLED, CASES[7]], ids=lambda case: case.name)
def test_a_request_frozen_in_flight_settles_with_that_step_s_token(pair: Pair, case: Case) -> None:
    """The step is neither lost nor repeated: its token goes out here, the next one there."""
    expected = pair.unmoved(case)
    running = pair.start(case)
    while not running.answer.tokens:  # its grammar is being made, however long that takes
        pair.step()
    pair.step(6)
    core_request, tokens = pair.here("core_request", running.request_id)
    pair.there("reserve", core_request, tokens, 0)
    before, outputs, after = pair.here("freeze_in_flight", running.request_id, "tokens")
    assert (before, after) == ("in flight", "settled")
    for output in outputs:
        running.answer.add(output)
    pair.there("attach", pair.here("snapshot", running.request_id), "tokens")
    pair.here("release", running.request_id)
    running.home = pair.there
    assert [expected] == pair.finish(running)


def test_a_request_that_ends_in_flight_does_not_move(pair: Pair) -> None:
    """The last token may come out of the very step that was in flight: then there is nothing to move."""
    case = Case("two tokens", PROMPT, {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True})
    running = pair.start(case)
    pair.step(1)
    before, outputs, after = pair.here("freeze_in_flight", running.request_id, "kv")
    assert (before, after) == ("in flight", "ended")
    assert [output["finish"] for output in outputs] == ["length"]


def test_room_that_is_being_written_to_is_not_reused(pair: Pair) -> None:
    """A move cancelled during its copy must not let that copy write into somebody else's blocks."""
    running = pair.start(GREEDY)
    pair.step(3)
    pair.there("reserve", *pair.here("core_request", running.request_id), 320)
    during, after = pair.there("cancel_while_copying", running.request_id)
    assert after - during == 10
    pair.finish(running)


def test_a_copy_runs_beside_decoding(pair: Pair) -> None:
    """Requests on both sides go on while blocks are in transit, the moved one included."""
    case = Case("with a long prompt", LONG_PROMPT, {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True})
    expected, beside = pair.all_unmoved([case, SAMPLED])
    running, near, far = pair.start(case), pair.start(SAMPLED), pair.start(SAMPLED, pair.there)
    pair.step(6)
    name = running.request_id
    reservation = pair.there("reserve", *pair.here("core_request", name), 0)
    plan, facts = CopyPlan(reservation), pair.here("facts", name)
    blocks, into, places = plan.missing(facts.full_block_ids, facts.block_epoch, reservation)
    rate = len(blocks) * pair.there("block_bytes") / 0.3
    pair.there("pull_begin", name, pair.here("handle"), blocks, into, rate)
    said = [len(one.answer.tokens) for one in (running, near, far)]
    pair.step(3)
    assert all(len(one.answer.tokens) > before for one, before in zip((running, near, far), said, strict=True))
    while pair.there("pull_runs"):
        pass
    assert pair.there("pull_end", name).blocks == len(blocks) == 21
    plan.copied(places, facts.block_epoch)
    pair.complete(running, plan)
    assert [expected, beside, beside] == pair.finish(running, near, far)


@pytest.mark.parametrize(
    "params",
    [SEEDED | PENALTIES, pytest.param({"temperature": 0.0, "ignore_eos": True}, marks=pytest.mark.long)],
    ids=["seeded", "greedy"],
)
def test_a_move_by_tokens_is_computed_ahead_of_time(pair: Pair, params: dict[str, object]) -> None:
    """However long a request is, little is left to compute after the freeze; its shadow is invisible."""
    case = Case(f"warmed {params}", LONG_PROMPT, params | {"max_tokens": 40})
    expected = pair.unmoved(case)
    running = pair.start(case)
    pair.step(6)
    name = running.request_id
    core_request, tokens = pair.here("core_request", name)
    assert pair.there("warm", core_request, tokens)
    while not pair.there("is_warm", name):
        pair.step()
    core_request, tokens = pair.here("core_request", name)
    reservation = pair.there("reserve", core_request, tokens, 0)
    assert reservation.reused_blocks == ((700 + 4) // 32,)
    pair.complete(running, CopyPlan(reservation), "tokens")
    assert [expected] == pair.finish(running)


def test_a_paced_request_yields_to_decodes_and_uses_idle_time(pair: Pair) -> None:
    """Beside a decoding request it keeps to its rate; once the worker is otherwise idle, it goes on at once."""
    case = Case("paced", LONG_PROMPT, {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True})
    expected, running = pair.unmoved(case), pair.start(case)
    pair.step(6)
    neighbour = pair.start(
        Case("beside", PROMPT, {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}), pair.there
    )
    pair.step(2)
    assert pair.there("warm", *pair.here("core_request", running.request_id), 0.001)
    pair.finish(neighbour)
    assert not pair.there("is_warm", running.request_id)
    while not pair.there("is_warm", running.request_id):
        pair.step()
    assert running.answer.finish is None
    reservation = pair.there("reserve", *pair.here("core_request", running.request_id), 0)
    assert reservation.reused_blocks >= (700 // 32,)
    pair.complete(running, CopyPlan(reservation), "tokens")
    assert [expected] == pair.finish(running)


def test_a_paced_request_can_be_cancelled_between_two_slices(pair: Pair) -> None:
    """Its pending slice is dropped as well."""
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    running = pair.start(Case("called off", LONG_PROMPT, params))
    neighbour = pair.start(Case("beside", PROMPT, params), pair.there)
    pair.step(6)
    assert pair.there("warm", *pair.here("core_request", running.request_id), 0.001)
    pair.step(3)
    pair.there("abort", [running.request_id])
    pair.finish(running, neighbour)
    assert not pair.there("is_warm", running.request_id)


def test_computing_ahead_can_be_cancelled(pair: Pair) -> None:
    """A request that ends, or whose move is cancelled, leaves no shadow."""
    running = pair.start(
        Case("long and greedy", LONG_PROMPT, {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True})
    )
    pair.step(4)
    pair.there("warm", *pair.here("core_request", running.request_id))
    pair.step()
    pair.there("abort", [running.request_id])
    pair.finish(running)


@contextlib.contextmanager
def crowded(pair: Pair) -> Iterator[None]:
    """Both workers with 240 of their 255 blocks reserved."""
    hogs = [(worker, f"hog-{number}") for worker in (pair.here, pair.there) for number in range(4)]
    for worker, name in hogs:
        worker("add", name, list(PROMPT), {"max_tokens": 1}, {})
        words = worker("core_request", name)
        worker("abort", [name])
        worker("reserve", *words, 60 * 32)
    yield
    for worker, name in hogs:
        worker("cancel", name)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_random_moves_under_preemption_change_no_answer(pair: Pair, seed: int) -> None:
    """Two workers so full that vLLM itself preempts, and random moves: every answer is unchanged."""
    chance = random.Random(seed)
    cases = [*CASES, Case("long, seeded", LONG_PROMPT[:400], SEEDED)]
    expected = dict(zip(cases, pair.all_unmoved(cases), strict=True))
    running, moved, preempted = [], 0, pair.preemptions
    with crowded(pair):
        for case in chance.choices(cases, k=24):
            where, priority = chance.choice((pair.here, pair.there)), chance.choice((-1, 0, 1))
            running.append(pair.start(case, where, priority=priority))
            for _ in range(chance.randrange(8)):
                pair.step(chance.randrange(4))
                one = chance.choice(running)
                if one.answer.finish is None:
                    with contextlib.suppress(Refused):  # no room there, or half-collected log-probabilities
                        moved += (
                            pair.move(one, chance.choice(("kv", "tokens")), decode_meanwhile=chance.randrange(3))
                            is not None
                        )
        answers = pair.finish(*running)
    assert [expected[one.case] for one in running] == answers
    assert moved > 5
    assert pair.preemptions > preempted


def test_a_request_with_blocks_does_not_wait_for_one_that_wants_them(pair: Pair) -> None:
    """A request that moves by tokens goes on, though a more urgent one waits for more blocks than are free."""
    small = Case("small", PROMPT, GREEDY.params | {"max_tokens": 20, "ignore_eos": True})
    large = Case("13 blocks", LONG_PROMPT[:400], GREEDY.params | {"max_tokens": 4})
    expected = pair.all_unmoved([small, large])
    running = pair.start(small)
    pair.step(3)
    with crowded(pair):  # 15 blocks are left
        urgent = pair.start(large, pair.there, priority=-1)
        assert pair.move(running, "tokens", decode_meanwhile=2) is not None
        assert not urgent.answer.tokens
        assert pair.finish(running, urgent) == expected


def test_the_least_urgent_is_preempted_first_and_resumed_last(pair: Pair) -> None:
    """Whoever came first: when blocks run out the urgent keep theirs, and start first."""
    case = Case("grows from 4 blocks to 6", LONG_PROMPT[:100], GREEDY.params | {"max_tokens": 80})
    large = Case("11 blocks", LONG_PROMPT[:330], GREEDY.params | {"max_tokens": 4})
    expected = [pair.unmoved(large), *[pair.unmoved(case)] * 4]
    preempted = pair.preemptions
    with crowded(pair):  # 15 blocks are left
        low, normal, high = (pair.start(case, priority=priority) for priority in (1, 0, -1))
        pair.step(3)
        last, urgent = pair.start(case, priority=1), pair.start(large, priority=-1)
        pair.finish(normal, high, urgent)
        assert low.answer.finish is None, "it was pushed out, and waits"
        assert not last.answer.tokens
        assert pair.finish(urgent, low, normal, high, last) == expected
    assert pair.preemptions == preempted + 1


@pytest.mark.parametrize("moves", [False, True], ids=["stays", "moves"])
def test_a_request_that_waited_too_long_goes_first(pair: Pair, moves: bool) -> None:
    """A preempted request goes before more urgent ones in the queue, and is not preempted again for others."""
    case = Case("grows from 4 blocks to 6", LONG_PROMPT[:100], GREEDY.params | {"max_tokens": 80})
    longer = Case("grows from 4 blocks to 8", LONG_PROMPT[:100], GREEDY.params | {"max_tokens": 140})
    large = Case("11 blocks", LONG_PROMPT[:330], GREEDY.params | {"max_tokens": 4})
    cases = (case, longer, large)
    expected = dict(zip(cases, pair.all_unmoved(cases), strict=True))
    with crowded(pair):  # 15 blocks are left
        low, *high = pair.start(longer, priority=1), *(pair.start(case, priority=-1) for _ in range(2))
        pair.finish(*high)
        assert low.answer.finish is None, "it was pushed out, and waits"
        first, second = (pair.start(large, priority=-1) for _ in range(2))
        pair.here("pass_time", 2.0)
        pair.finish(first)
        count = len(low.answer.tokens)
        pair.here("pass_time", 61.0)
        while len(low.answer.tokens) == count:
            pair.step()
        assert not second.answer.tokens
        if moves:
            pair.move(low, "tokens")
        others = [pair.start(case, low.home, priority=-1) for _ in range(2)]
        assert pair.finish(low) == [expected[longer]]
        assert any(one.answer.finish is None for one in others), "one of the urgent gave way"
        assert pair.finish(*others, second) == [expected[case]] * 2 + [expected[large]]


def test_first_come_first_served_is_left_unchanged(pair: Pair) -> None:
    """In that order the longest-waiting request is first already."""
    assert pair.here("plain_line") == ["first", "second"]


def test_the_report_equals_the_block_tables(pair: Pair) -> None:
    """Every change of blocks or phase is reported once, whatever prefills, decodes, moves or ends."""
    known: dict[str, tuple[int, str]] = {}
    running = [pair.start(Case("long", LONG_PROMPT, SEEDED | {"max_tokens": 70})), pair.start(GREEDY)]
    pair.here("report")
    pair.here("forget_report")
    quiet = 0
    for step in range(60):
        if step == 40:
            pair.move(running[1], "kv", decode_meanwhile=0)
        pair.step()
        report = pair.here("report")
        known |= report.changed
        tables = pair.here("block_table_sizes")
        assert tables == {name: known[name][0] for name in tables}
        assert (report.used_blocks, report.shared_blocks) == (sum(tables.values()), 0)
        quiet += not report.changed
    assert quiet > 30
    assert known[running[0].request_id][1] == "decoding"
    pair.finish(*running)


def test_a_waiting_request_returns_to_its_place_in_the_queue(pair: Pair) -> None:
    """First come, first served, even after a cancelled move."""
    running = [pair.start(GREEDY) for _ in range(3)]
    names = [one.request_id for one in running]
    pair.here("freeze", names[1], "kv")
    assert [names[0], names[2]] == pair.here("state")["waiting"]
    pair.here("thaw", names[1])
    assert names == pair.here("state")["waiting"]
    pair.finish(*running)


def test_a_dead_worker_s_request_resumes_from_the_log(pair: Pair) -> None:
    """Prompt and tokens so far are enough: even a seeded, penalised or schema-bound answer continues exactly."""
    cases = [case for case in CASES if case.name != "prompt logprobs"]
    assert pair.all_resumed_from_the_log(cases) == pair.all_unmoved(cases)


def test_the_destination_uses_its_own_prefix_cache(pair: Pair) -> None:
    """Cached blocks are neither copied nor computed, and the answer is the same."""
    case = Case("common prefix", LONG_PROMPT[:320], {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True})
    expected = pair.finish(pair.start(case, pair.there, salt="common"))[0]
    running = pair.start(case, salt="common")
    pair.step(8)
    core_request, tokens = pair.here("core_request", running.request_id)
    reservation = pair.there("reserve", core_request, tokens, 0)
    pair.there("cancel", running.request_id)
    assert reservation.reused_blocks == (10,)
    pair.move(running, "kv")
    assert expected.tokens == pair.finish(running)[0].tokens


def test_moved_blocks_serve_later_prompts(pair: Pair) -> None:
    """They enter the destination's prefix cache with the right hashes and bytes."""
    case = Case("to be cached", LONG_PROMPT[:330], {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True})
    running = pair.start(case, salt="moved")
    pair.step(8)
    pair.move(running, "kv")
    expected = pair.finish(running)[0]
    again = pair.start(case, pair.there, salt="moved")
    core_request, _ = pair.there("core_request", again.request_id)
    pair.there("abort", [again.request_id])
    reservation = pair.there("reserve", core_request, expected.tokens, 0)
    pair.there("cancel", again.request_id)
    assert reservation.reused_blocks == ((330 + 40 - 1) // 32,)
    assert expected.tokens == pair.finish(pair.start(case, pair.there, salt="moved"))[0].tokens


def test_blocks_in_doubt_serve_no_later_prompt(pair: Pair) -> None:
    """A source released early may have copied what was no longer the request's: nobody else may read that."""
    case = Case("in doubt", LONG_PROMPT[:330], {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True})
    expected = pair.unmoved(case)
    running = pair.start(case, salt="doubt")
    pair.step(8)
    core_request, tokens = pair.here("core_request", running.request_id)
    facts = pair.here("facts", running.request_id)
    pair.there("reserve", core_request, tokens, 0, facts.num_computed_tokens)
    pair.here("freeze", running.request_id, "kv")
    pair.there("attach", pair.here("snapshot", running.request_id), "kv")  # no byte of it was copied
    pair.there("uncache", running.request_id)
    for worker in (pair.here, pair.there):
        worker("abort", [running.request_id])
    assert pair.finish(pair.start(case, pair.there, salt="doubt")) == [expected]


def test_uncomputed_blocks_of_a_preempted_request_are_not_reused(pair: Pair) -> None:
    """No prompt uses a block of the step that vLLM planned for a request before it preempted it."""
    case = Case("preempted", LONG_PROMPT[:40], {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True})
    urgent = Case("urgent", LONG_PROMPT[40:640], {"temperature": 0.0, "max_tokens": 4})
    later = Case("later", case.prompt + tuple(pair.unmoved(case).tokens[:30]), {"temperature": 0.0, "logprobs": 3})
    expected = pair.all_unmoved([case, urgent, later])
    running = [pair.start(case, salt="preempted", priority=2)]
    while pair.here("facts", running[0].request_id).num_computed_tokens < 62:
        pair.step(1)
    running.append(pair.start(urgent, priority=1))
    pair.step(1)  # the next step fills a block of the first, and needs many for the other
    pair.here("use_up")
    pair.step(1)
    assert not pair.here("state")["running"]
    pair.here("give_back")
    assert pair.finish(*running) == expected[:2]
    assert pair.finish(pair.start(later, salt="preempted")) == expected[2:]


def test_requests_that_share_blocks_separate_without_harm(pair: Pair) -> None:
    """One of two requests with a common prompt leaves; the other keeps the blocks, and they count once."""
    case = Case("shared", LONG_PROMPT[:200], {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True})
    first = pair.start(case, salt="shared")
    pair.step(2)
    second = pair.start(case, salt="shared")
    pair.step(2)
    report = pair.here("report")
    held = sum(blocks for blocks, *_ in report.changed.values())
    assert held - report.used_blocks == report.shared_blocks > 0
    pair.move(first, "kv")
    answers = pair.finish(first, second)
    assert answers[0].tokens == answers[1].tokens


def test_lack_of_room_is_reported_before_anything_is_taken(pair: Pair) -> None:
    """A destination that cannot hold the request is unchanged, and so is the source."""
    expected = pair.unmoved(SAMPLED)
    running = [pair.start(SAMPLED) for _ in range(4)]
    pair.step(5)
    words = [pair.here("core_request", one.request_id) for one in running]
    for core_request, tokens in words[:3]:
        pair.there("reserve", core_request, tokens, 2048)  # 64 of 255 blocks
    before = pair.there("state")
    with pytest.raises(Refused, match="no room"):
        pair.there("reserve", *words[3], 2048)
    assert before == pair.there("state")
    first = pair.there("reserve", *words[3], 300)
    with pytest.raises(Refused, match="no room"):
        pair.there("grow", running[3].request_id, 2048)
    assert first == pair.there("grow", running[3].request_id, 300)
    for one in running:
        pair.there("cancel", one.request_id)
    assert [expected] * 4 == pair.finish(*running)


def test_an_unmovable_request_is_refused_with_its_reason(pair: Pair) -> None:
    """Half-collected prompt log-probabilities, unknown or duplicate ids: typed errors, nothing touched."""
    assert pair.here("refusal", "nobody", "kv") == MoveRefusal.UNKNOWN
    case = Case("half collected", LONG_PROMPT, {"temperature": 0.0, "max_tokens": 5, "prompt_logprobs": 1})
    expected = pair.unmoved(case)
    running = pair.start(case)
    assert pair.here("refusal", running.request_id, "kv") is None
    pair.step(1)
    assert pair.here("refusal", running.request_id, "kv") == MoveRefusal.PROMPT_LOGPROBS
    with pytest.raises(Refused) as refused:
        pair.here("freeze", running.request_id, "kv")
    assert refused.value.reason == MoveRefusal.PROMPT_LOGPROBS
    core_request, tokens = pair.here("core_request", running.request_id)
    with pytest.raises(Refused) as refused:
        pair.here("reserve", core_request, tokens, 0)
    assert refused.value.reason == MoveRefusal.ALREADY_THERE
    pair.move(running, "tokens", decode_meanwhile=0)
    assert [expected] == pair.finish(running)


def test_a_client_may_leave_in_the_middle_of_a_move(pair: Pair) -> None:
    """An abort finds the request in any state: frozen on one side, expected on the other."""
    running = pair.start(SAMPLED)
    pair.step(6)
    core_request, tokens = pair.here("core_request", running.request_id)
    pair.there("reserve", core_request, tokens, 0)
    pair.here("freeze", running.request_id, "kv")
    pair.here("abort", [running.request_id])
    pair.there("abort", [running.request_id])


def test_a_snapshot_of_another_engine_is_refused(pair: Pair) -> None:
    """Blocks of another model, precision or block size would be garbage."""
    running = pair.start(GREEDY)
    pair.step(5)
    core_request, tokens = pair.here("core_request", running.request_id)
    pair.there("reserve", core_request, tokens, 0)
    pair.here("freeze", running.request_id, "kv")
    import msgspec

    snapshot = msgspec.msgpack.decode(pair.here("snapshot", running.request_id), type=RequestSnapshot)
    other = msgspec.msgpack.encode(msgspec.structs.replace(snapshot, engine="another"))
    with pytest.raises(Refused) as refused:
        pair.there("attach", other, "kv")
    assert refused.value.reason == MoveRefusal.INCOMPATIBLE
    pair.there("cancel", running.request_id)
    pair.here("thaw", running.request_id)
    assert [pair.unmoved(GREEDY)] == pair.finish(running)
