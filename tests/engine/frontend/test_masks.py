"""Parameters that forbid every token: detected at once, or as soon as the sampler has no other."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput

from melld.engine.fleet.step_outputs import Step
from melld.engine.frontend.masks import Mask, Masks
from melld.errors import NoTokenLeft

VOCABULARY = 6
END = 1
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4)


def params(bad_words: list[list[int]] | None = None, **fields: Any) -> SamplingParams:
    """Return parameters as vLLM has completed them."""
    made = SamplingParams(bad_words=["word"] * len(bad_words or ()), **fields)
    made._bad_words_token_ids = bad_words
    made._all_stop_token_ids = {END, *(made.stop_token_ids or ())}
    return made


@st.composite
def all_params(draw: st.DrawFn) -> SamplingParams:
    """Draw any parameters that forbid tokens."""
    return params(
        draw(st.lists(TOKENS, max_size=4)),
        allowed_token_ids=draw(st.none() | TOKENS),
        min_tokens=draw(st.integers(0, 2)),
        stop_token_ids=draw(TOKENS),
    )


def forbidden(given_params: SamplingParams, said: list[int]) -> set[int]:
    """Return what vLLM's sampler masks after these tokens."""
    words = given_params.bad_words_token_ids or []
    masked = {
        word[-1] for word in words if len(word) - 1 <= len(said) and said[len(said) - len(word) + 1 :] == word[:-1]
    }
    if given_params.allowed_token_ids is not None:
        masked |= set(range(VOCABULARY)) - set(given_params.allowed_token_ids)
    return masked | (given_params.all_stop_token_ids if len(said) < given_params.min_tokens else set())


@given(all_params(), st.lists(st.integers(0, VOCABULARY - 1), max_size=6))
def test_a_token_passes_unless_the_sampler_masks_it(given_params: SamplingParams, tokens: list[int]) -> None:
    """No answer fails without a reason, and no contradiction is returned as text."""
    mask = Mask(given_params, VOCABULARY)
    if len(forbidden(given_params, [])) == VOCABULARY:
        with pytest.raises(NoTokenLeft):
            mask.check_first()
    else:
        mask.check_first()
    for index, token in enumerate(tokens):
        if token in forbidden(given_params, tokens[:index]):
            with pytest.raises(NoTokenLeft):
                mask.check([token])
            return
        mask.check([token])


def test_a_structured_output_may_end_early() -> None:
    """vLLM lets it end where it is complete: `min_tokens` is no contradiction."""
    Mask(params(min_tokens=3, structured_outputs=StructuredOutputsParams(choice=["a"])), VOCABULARY).check([2, END])


def test_ids_outside_the_vocabulary_forbid_nothing() -> None:
    """A model's configuration may name an end token that does not exist."""
    mask = Mask(params([[VOCABULARY]], min_tokens=2, stop_token_ids=[VOCABULARY + 3]), VOCABULARY)
    mask.check_first()
    mask.check([2, 3])


class Queue(list[Exception]):
    """What the reader of a request's outputs gets."""

    put = list.append


class State:
    """A request as vLLM has it."""

    def __init__(self) -> None:
        self.queue = Queue()


def test_the_error_replaces_the_token_and_others_go_on() -> None:
    """One request ends, its forbidden token unseen; the rest of the step is delivered."""
    states = {"a": State(), "b": State(), "plain": State()}
    masks = Masks(states, VOCABULARY)
    for name in ("a", "b"):
        masks.add(name, params([[2, 2]], allowed_token_ids=[2]))
    masks.add("plain", params())
    with pytest.raises(NoTokenLeft, match="allowed_token_ids and bad_words rule out every possible next token"):
        masks.add("refused", params([[2]], allowed_token_ids=[2]))

    def told(**tokens: list[int]) -> dict[str, list[int]]:
        outputs = [EngineCoreOutput(request_id=name, new_token_ids=made) for name, made in tokens.items()]
        return {one.request_id: one.new_token_ids for one in masks.sift(Step(outputs=outputs)).outputs}

    assert told(a=[2], plain=[0], b=[]) == {"a": [2], "plain": [0], "b": []}
    assert told(a=[0], plain=[0], b=[2]) == {"plain": [0], "b": [2]}
    assert [str(error) for error in states["a"].queue] == [
        "allowed_token_ids and bad_words rule out every possible next token, after 1 output tokens"
    ]
    assert not states["b"].queue
    del states["a"]
    assert told(a=[0], gone=[1]) == {"a": [0], "gone": [1]}


def test_tokens_forced_by_vllm_are_no_contradiction() -> None:
    """A thinking budget ends the thinking with a token that may be forbidden."""
    states = {"a": State()}
    masks = Masks(states, VOCABULARY)
    masks.add("a", params(allowed_token_ids=[2], thinking_token_budget=1))
    forced = Step(outputs=[EngineCoreOutput(request_id="a", new_token_ids=[4])])
    assert masks.sift(forced).outputs
    assert not states["a"].queue
