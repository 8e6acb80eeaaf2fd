"""Every text-generating family of docs/models.md keeps what the page says, and moves as the page says."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from melld.kvstore.kept import uncopied
from tests.docs.architectures import architectures
from tests.docs.models_text import ROWS
from tests.engine.worker.residency.driver import WorkerFailed
from tests.engine.worker.residency.pair import Case, Pair, two_workers
from tests.engine.worker.residency.test_residency import GREEDY, HALF_PREFILLED, LONG_PROMPT, SAMPLED
from tests.families.every import FAMILIES, WITHOUT_CPU

pytestmark = pytest.mark.long
LONG = Case("beyond every window", LONG_PROMPT, {"temperature": 0.0, "ignore_eos": True, "max_tokens": 48})
KEPT = {name: row.keeps for row in ROWS for name in row.models}
NAMES = [name for name, family in FAMILIES.items() if "runner" not in family.options and name not in WITHOUT_CPU]


@pytest.fixture(scope="module", params=NAMES)
def family(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared_pair(model_of: Callable[[str], Path], family: str) -> Iterator[Pair]:
    """Two workers."""
    with two_workers(model_of(family), dict(FAMILIES[family].options)) as workers:
        yield Pair(*workers)


def test_the_family_keeps_what_the_page_says(pair: Pair, family: str) -> None:
    """The page tells how a model's requests move before its weights are downloaded."""
    kinds = set(pair.here("kinds"))
    assert kinds == set(KEPT.get(family, kinds))
    [read] = [one.keeps for one in architectures() if one.name == FAMILIES[family].model]
    assert kinds <= read


@pytest.fixture
def ways(pair: Pair) -> list[str]:
    """Return how its requests move."""
    return ["tokens"] if uncopied(pair.here("kinds")) else ["kv", "tokens"]


@pytest.fixture
def cases(family: str) -> list[Case]:
    """Return the cases; with a drafter, only those whose answers do not depend on its accepted guesses."""
    return [GREEDY, LONG] if "speculative_config" in FAMILIES[family].options else [GREEDY, LONG, SAMPLED]


def test_moved_requests_give_their_unmoved_answers(pair: Pair, cases: list[Case], ways: list[str]) -> None:
    """By KV and by tokens, at once."""
    assert len(set(pair.unmoved(LONG).tokens)) > 5
    if "kv" in ways:
        pair.spoil()
    pair.check_moves([(case, via) for case in cases for via in ways], 9, say_the_same)


def test_a_half_prefilled_request_can_move(pair: Pair, cases: list[Case], ways: list[str]) -> None:
    """The computed part of its prompt comes along, or is computed again."""
    pair.check_move(HALF_PREFILLED if SAMPLED in cases else LONG, ways[0], 2)


def test_a_dead_worker_s_request_resumes_from_the_log(pair: Pair, cases: list[Case]) -> None:
    """Prompt and tokens so far are enough."""
    for answer, unmoved in zip(pair.all_resumed_from_the_log(cases), pair.all_unmoved(cases), strict=True):
        assert say_the_same(answer, unmoved)


@pytest.mark.parametrize("name", WITHOUT_CPU)
def test_what_the_page_calls_impossible_on_cpus_is_impossible(model_of: Callable[[str], Path], name: str) -> None:
    """The page and this list change once vLLM can."""
    options = dict(FAMILIES[name].options)
    with pytest.raises(WorkerFailed), two_workers(model_of(name), options) as workers:
        Pair(*workers).unmoved(LONG)


def test_answers_are_unchanged_after_the_weights_are_reread(pair: Pair) -> None:
    """Waking an idle model gives the same text, or it never released its weights."""
    expected = pair.unmoved(LONG)
    pair.here("doze_and_wake")
    assert pair.finish(pair.start(LONG)) == [expected]


def say_the_same(answer: Any, unmoved: Any) -> bool:
    """Return True if equal up to rounding: some layers sum a prompt differently from single tokens."""
    return (
        answer.tokens == unmoved.tokens
        and answer.finish == unmoved.finish
        and np.allclose(answer.logprobs, unmoved.logprobs, atol=1e-3)
    )
