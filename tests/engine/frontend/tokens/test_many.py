"""Answers decoded many tokens at a time have the text of those decoded token by token."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.decoders import ByteFallback
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from melld.engine.frontend.tokens.many import ManyTokens, decode_many

WORDS = "Grüße, 世界 🙂 \ufffd plain words 🏳️‍🌈"


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    """The demo model's tokenizer, whose tokens are bytes."""
    return AutoTokenizer.from_pretrained(demo_model)


def detokenizer_of(tokenizer: Any, **asked: Any) -> Any:
    """Return vLLM's detokenizer for a new request."""
    request = SimpleNamespace(request_id="a", prompt_token_ids=[5, 6], sampling_params=SamplingParams(**asked))
    return FastIncrementalDetokenizer(tokenizer, request)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("hides_special", [True, False])
def test_the_text_is_vllm_s(tokenizer: Any, seed: int, hides_special: bool) -> None:
    """Also with special tokens, halves of characters and bytes that are none, and wherever the batches end."""
    random_of = random.Random(seed)
    special = tokenizer.all_special_ids
    tokens = list[int]()
    for _ in range(60):
        some = tokenizer.encode(WORDS, add_special_tokens=False)
        start = random_of.randrange(len(some))
        tokens += some[start : start + random_of.randrange(6)]
        tokens += random_of.choices(range(tokenizer.vocab_size), k=random_of.choice([0, 0, 1]))
        tokens += random_of.choices(special, k=random_of.choice([0, 0, 1]))
    plain, ours = (detokenizer_of(tokenizer, skip_special_tokens=hides_special) for _ in range(2))
    decode_many(ours)
    assert isinstance(ours, ManyTokens)
    while tokens:
        batch, tokens = tokens[: (size := random_of.randrange(1, 20))], tokens[size:]
        stopped = not tokens
        assert plain.update(list(batch), stopped) == ours.update(list(batch), stopped)
        assert (ours.output_text, ours.token_ids) == (plain.output_text, plain.token_ids)


def test_many_plain_tokens_are_decoded_in_one_go(tokenizer: Any) -> None:
    """A step of vLLM's decoder for each is most of what an answer costs, even if each comes alone."""
    ours, steps = detokenizer_of(tokenizer), list[int]()
    decode_many(ours)
    step = ours._protected_step

    def counted(token: int) -> str | None:
        steps.append(token)
        text: str | None = step(token)
        return text

    ours._protected_step = counted
    tokens = tokenizer.encode("plain words, plain words, and more of them", add_special_tokens=False)
    ours.update(tokens[:1], False)
    ours.update(tokens[1:-2], False)
    ours.update(tokens[-2:-1], False)
    assert ours.text_of(tokens[-1:]) == tokenizer.decode(tokens[-1:])
    assert steps == tokens[:1]


def test_what_is_no_token_is_left_out_as_by_vllm(tokenizer: Any) -> None:
    """A worker's fault must not end the answer."""
    plain, ours = (detokenizer_of(tokenizer) for _ in range(2))
    decode_many(ours)
    for batch in ([300], [-1, 301], [-1]):
        plain.update(batch, False)
        ours.update(batch, False)
    assert ours.output_text == plain.output_text


def test_tokens_that_are_not_bytes_stay_vllm_s(tokenizer: Any) -> None:
    """Their text may depend on the tokens before, or hide the spaces between special tokens."""
    spaced = detokenizer_of(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False)
    other = detokenizer_of(tokenizer)
    other.tokenizer = type(other.tokenizer).from_str(other.tokenizer.to_str())
    other.tokenizer.decoder = ByteFallback()
    for one in (spaced, other):
        decode_many(one)
        assert type(one) is FastIncrementalDetokenizer
