"""Copies of a tokenizer share its tables, and are otherwise as vLLM's own."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.tokenizers import maybe_make_thread_pool

from melld.engine.frontend.tokens import copies
from melld.engine.frontend.tokens.copies import twin, with_cheap_copies

ADDED = [AddedToken("<|tool|>", special=True), AddedToken("<think>", special=False, rstrip=True), AddedToken("Hé")]
TEXTS = st.lists(st.sampled_from(["<|tool|>", "<think>", "Hé", "hé ", "\n"]) | st.text(max_size=8)).map("".join)


@cache
def of_kind(kind: str) -> Tokenizer:
    """A tokenizer of this kind of model, with tokens that were added."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "BPE":
        found = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
        found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind == "Unigram":
        found = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), *((one, -2.0) for one in letters)], 0, True))
        found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        words = {"[UNK]": 0} | {f"{mark}{letter}": at for at, (mark, letter) in enumerate(_pieces(), 1)}
        found = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))  # noqa: S106
        found.normalizer, found.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        found.decoder = decoders.WordPiece()
    found.add_tokens(ADDED)
    return found


def _pieces() -> list[tuple[str, str]]:
    return [(mark, letter) for mark in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece"])
@given(text=TEXTS)
def test_a_twin_reads_and_writes_alike(kind: str, text: str) -> None:
    """Whatever the kind of vocabulary, added tokens included."""
    tokenizer = of_kind(kind)
    other = twin(tokenizer)
    assert other is not None
    assert other.to_str() == tokenizer.to_str()
    for special in (True, False):
        read = tokenizer.encode(text, add_special_tokens=special)
        assert other.encode(text, add_special_tokens=special).ids == read.ids
        assert other.decode(read.ids, skip_special_tokens=special) == tokenizer.decode(read.ids, special)


def test_settings_are_copied_and_then_apart() -> None:
    """Each thread cuts and pads as its own call says."""
    tokenizer = of_kind("BPE")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6, pad_token="!")  # noqa: S106
    other = twin(tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert other is not None
    assert other.encode("abcdefgh").tokens == ["a", "b", "c", "d", "!", "!"]
    assert len(tokenizer.encode("abcdefgh").ids) == 8


def test_no_twin_has_other_added_tokens() -> None:
    """Then vLLM's own copies are used."""

    class Odd:
        def __getattr__(self, name: str) -> Any:
            return getattr(of_kind("BPE"), name)

        def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
            return {token + 1: added for token, added in of_kind("BPE").get_added_tokens_decoder().items()}

    assert twin(Odd()) is None  # type: ignore[arg-type]


def test_copies_hold_one_table(demo_model: Path) -> None:
    """With a large vocabulary a complete copy takes a second, in which no stream goes on."""
    tokenizer = with_cheap_copies(AutoTokenizer.from_pretrained(demo_model))
    for other in (copy.copy(tokenizer), copy.deepcopy(tokenizer)):
        assert other is not tokenizer
        assert type(other) is type(tokenizer)
        assert other.get_vocab() is tokenizer.get_vocab()
        assert other("a <think> b")["input_ids"] == tokenizer("a <think> b")["input_ids"]
    assert copy.copy(tokenizer)._tokenizer is tokenizer._tokenizer
    assert copy.deepcopy(tokenizer)._tokenizer is not tokenizer._tokenizer


def test_a_tokenizer_that_has_no_twin_later_is_copied_whole(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens may have been added to it since."""
    tokenizer = with_cheap_copies(AutoTokenizer.from_pretrained(demo_model))
    monkeypatch.setattr(copies, "twin", lambda _: None)
    other = copy.deepcopy(tokenizer)
    assert other._tokenizer is not tokenizer._tokenizer
    assert other("a <think> b")["input_ids"] == tokenizer("a <think> b")["input_ids"]


def test_threads_can_use_the_copies_at_once(demo_model: Path) -> None:
    """One tokenizer would fail with "Already borrowed", since each call sets how it cuts."""
    tokenizer: PreTrainedTokenizerFast = copy.copy(with_cheap_copies(AutoTokenizer.from_pretrained(demo_model)))
    whole = tokenizer("the loop and the lock " * 200)["input_ids"]
    maybe_make_thread_pool(tokenizer, 2)

    def cut(length: int) -> list[int]:
        return tokenizer("the loop and the lock " * 200, truncation=True, max_length=length)["input_ids"]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(cut, range(1, 200))) == [whole[:length] for length in range(1, 200)]
