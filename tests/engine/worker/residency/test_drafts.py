"""Requests with speculative tokens, from a draft model, an EAGLE or MTP head or the prompt, move as others do.

With greedy sampling, for which drafts change nothing but the pace.  vLLM itself gives a seeded request other tokens
each time that other tokens are drafted.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from melld.migrate.snapshot import MoveRefusal
from tests.engine.worker.residency.driver import Refused
from tests.engine.worker.residency.pair import Case, Pair, two_workers
from tests.engine.worker.residency.test_residency import GREEDY, LONG_PROMPT, SCHEMA
from tests.families.every import WITHOUT_CPU
from tests.families.family import make_family
from tests.families.heads import HEADS, TWO_MODULES
from tests.tiny_models import make_drafter, make_eagle

DRAFTED = 3
CALM = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 28}
CASES = [
    GREEDY,
    Case("penalties", GREEDY.prompt, CALM | {"presence_penalty": 0.6, "repetition_penalty": 1.2}),
    Case("json schema", GREEDY.prompt, {"temperature": 0.0, "max_tokens": 44, "json": SCHEMA}),
    Case("what the prompt says", GREEDY.prompt[:12] * 6, CALM),
]


LATER = (("ngram", False), ("eagle", False), ("draft_model", True), ("eagle", True))
LATER += tuple((name, False) for name in HEADS if name not in WITHOUT_CPU)


@pytest.fixture(
    scope="module",
    params=[("draft_model", False), *(pytest.param(one, marks=pytest.mark.long) for one in LATER)],
    ids=lambda param: f"{param[0]}{' ahead' * param[1]}",
)
def drafter(request: Any) -> tuple[str, bool]:
    """How tokens are drafted, or the family that brings its head for it; and whether two steps are in flight."""
    method, ahead = request.param
    return str(method), bool(ahead)


@pytest.fixture(scope="module")
def shared_pair(
    demo_model: Path,
    model_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    drafter: tuple[str, bool],
) -> Iterator[Pair]:
    """Two workers that draft two or three tokens a step."""
    method, ahead = drafter
    if method in HEADS:
        with two_workers(model_of(method), dict(HEADS[method].options)) as workers:
            yield Pair(*workers)
        return
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTED}
    directory = tmp_path_factory.mktemp("draft") / "draft"
    if method == "draft_model":
        make_drafter(demo_model, directory, 1)
        config["model"] = str(directory)
    elif method == "eagle":
        make_eagle(demo_model, directory)
        config["model"] = str(directory)
    else:
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with two_workers(demo_model, {"speculative_config": config, "async_scheduling": ahead}) as workers:
        yield Pair(*workers)


@pytest.fixture(scope="module")
def undrafted(plain_pair: Pair, model_of: Callable[[str], Path], drafter: tuple[str, bool]) -> Iterator[Pair]:
    """Two workers with the same model that draft nothing."""
    if drafter[0] not in HEADS:
        yield plain_pair
        return
    options = {key: value for key, value in HEADS[drafter[0]].options.items() if key != "speculative_config"}
    with two_workers(model_of(drafter[0]), options) as workers:
        yield Pair(*workers)


def test_drafts_change_the_pace_and_no_token(pair: Pair, undrafted: Pair) -> None:
    """Some are accepted and some are not: fewer steps than tokens, and the tokens of a worker without drafts."""
    paces = []
    for case, plain in zip(CASES, undrafted.all_unmoved(CASES), strict=True):
        running = pair.start(case)
        steps = 0
        while running.answer.finish is None:
            pair.step()
            steps += 1
        assert running.answer.tokens == plain.tokens
        tokens = len(running.answer.tokens)
        assert steps > 1 + math.ceil((tokens - 1) / (1 + DRAFTED))
        paces.append(steps / tokens)
    assert min(paces) < 1


@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_moved_requests_give_their_unmoved_answers(pair: Pair, via: str) -> None:
    """Pending drafts are dropped and drafted again at the destination."""
    pair.check_moves([(case, via) for case in CASES], 4)


def test_log_probabilities_continue(pair: Pair) -> None:
    """A token's do not depend on whether it was drafted, except in the last bits."""
    case = Case("log-probabilities", GREEDY.prompt, CALM | {"logprobs": 3})
    expected = pair.unmoved(case)
    running = pair.start(case)
    pair.step(5)
    pair.move(running, "kv")
    (moved,) = pair.finish(running)
    assert moved.tokens == expected.tokens
    assert np.allclose(moved.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_a_request_can_move_at_any_token(pair: Pair, via: str) -> None:
    """Drafts end within blocks, at their edges, and beyond them."""
    pair.check_every_move(GREEDY, via, 9)


@pytest.mark.long
@pytest.mark.parametrize("via", ["kv", "tokens"])
def test_a_half_prefilled_request_can_move(pair: Pair, via: str) -> None:
    """The drafter has computed as much of the prompt as the model."""
    pair.check_move(Case("long", LONG_PROMPT, CALM), via, 2)


def test_drafts_are_as_good_after_a_move(pair: Pair) -> None:
    """The drafter's KV came along in the same blocks."""
    steps = []
    for moves in (0, 2):
        running = pair.start(GREEDY)
        count = 0
        while running.answer.finish is None:
            if count in (6, 12)[:moves]:
                pair.move(running, "kv", decode_meanwhile=0)
            pair.step()
            count += 1
        steps.append(count)
    unmoved, moved = steps
    assert moved <= unmoved + 2 * 2  # each move costs what was drafted, and at most a step


def test_a_cancelled_move_leaves_the_request_unchanged(pair: Pair) -> None:
    """It goes on at home."""
    expected = pair.unmoved(GREEDY)
    running = pair.start(GREEDY)
    pair.step(6)
    core_request, tokens = pair.here("core_request", running.request_id)
    pair.there("reserve", core_request, tokens, 200)
    assert pair.here("freeze", running.request_id, "kv") == "settled"
    pair.there("cancel", running.request_id)
    pair.here("thaw", running.request_id)
    assert pair.finish(running) == [expected]


def test_a_dead_worker_s_request_resumes_from_the_log(pair: Pair) -> None:
    """Prompt and tokens so far are enough, even with several tokens per step."""
    expected = [answer.tokens for answer in pair.all_unmoved(CASES)]
    running = [pair.start(case) for case in CASES]
    core = [pair.here("core_request", one.request_id)[0] for one in running]
    pair.step(6)
    pair.here("abort", [one.request_id for one in running])
    for one, words in zip(running, core, strict=True):
        one.home = pair.there
        pair.there("attach_unreserved", words, one.answer.tokens)
    assert [answer.tokens for answer in pair.finish(*running)] == expected


@pytest.mark.long
def test_seeded_requests_complete_wherever_they_are(pair: Pair) -> None:
    """Their tokens may differ, their number not; nothing of them stays behind."""
    case = Case("seeded", GREEDY.prompt, CALM | {"temperature": 0.9, "seed": 3})
    running = [pair.start(case) for _ in range(4)]
    pair.step(4)
    for one, via in zip(running, ("kv", "tokens", "kv", "tokens"), strict=True):
        pair.move(one, via, decode_meanwhile=1)
    assert [len(answer.tokens) for answer in pair.finish(*running)] == [28] * 4


def test_a_worker_with_another_drafter_takes_no_kv(pair: Pair, undrafted: Pair) -> None:
    """Blocks without the drafter's part do not fit; by tokens any request can go anywhere."""
    running = pair.start(GREEDY)
    pair.step(4)
    core_request, tokens = pair.here("core_request", running.request_id)
    plain = undrafted.here
    plain("reserve", core_request, tokens, 0)
    pair.here("freeze", running.request_id, "kv")
    with pytest.raises(Refused) as refused:
        plain("attach", pair.here("snapshot", running.request_id), "kv")
    assert refused.value.reason is MoveRefusal.INCOMPATIBLE
    plain("cancel", running.request_id)
    pair.here("thaw", running.request_id)
    pair.finish(running)


@pytest.mark.long
def test_requests_whose_drafter_reads_far_ahead_stay_but_outlive_their_worker(tmp_path: Path) -> None:
    """MTP with two modules: no move, yet a worker's death costs no request."""
    make_family(TWO_MODULES, tmp_path)
    with two_workers(tmp_path, dict(TWO_MODULES.options)) as workers, Pair(*workers).emptied() as pair:
        running = pair.start(GREEDY)
        pair.step(4)
        assert pair.here("refusal", running.request_id, "tokens") is MoveRefusal.SPECULATIVE
        assert [pair.unmoved(GREEDY)] == pair.finish(running)
        answers = zip(pair.all_resumed_from_the_log(CASES), pair.all_unmoved(CASES), strict=True)
        assert all(answer.tokens == unmoved.tokens for answer, unmoved in answers)
