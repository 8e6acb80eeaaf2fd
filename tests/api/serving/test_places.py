"""Offsets of tokens in a text, even when tokens split characters."""

import codecs
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from melld.api.serving.places import Places
from melld.engine.frontend.tokens.texts import bytes_of, true_bytes

TEXTS = st.text(st.sampled_from("ab \n\u00e9\u2014\u65e5\U0001f642"), max_size=12)
SPECIAL = 0


def named(part: bytes) -> str:
    """Return the printed form of a token with these bytes."""
    try:
        return part.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in part)


@st.composite
def tokens_of(draw: st.DrawFn, text: str) -> list[str]:
    """Cut a text's bytes anywhere."""
    whole = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=8))) if whole else []
    return [named(whole[start:end]) for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True) if start < end]


def places_in(tokens: list[str]) -> list[int]:
    """Return the number of complete characters before each token."""
    said = [b"".join(map(bytes_of, tokens[:count])) for count in range(len(tokens))]
    return [len(codecs.decode(one, "utf-8", "ignore")) for one in said]


@given(TEXTS.flatmap(tokens_of), st.data())
def test_a_token_s_offset_is_that_of_its_character(tokens: list[str], data: st.DataObject) -> None:
    """Clients cut the text there, however the stream is chunked; special tokens are not part of it."""
    mixed = [piece for token in tokens for piece in data.draw(st.sampled_from(([token], [None, token])))]
    ids = [SPECIAL if token is None else 1 for token in mixed]
    texts = [token or "<|end|>" for token in mixed]
    places = Places(frozenset({SPECIAL}))
    cut = data.draw(st.integers(0, len(ids)))
    offsets = places.take(ids[:cut], texts[:cut]) + places.take(ids[cut:], texts[cut:])
    assert [offset for offset, token in zip(offsets, mixed, strict=True) if token is not None] == places_in(tokens)


@given(TEXTS, TEXTS, st.data())
def test_an_echo_does_not_count_the_added_begin_token(prompt: str, said: str, data: st.DataObject) -> None:
    """Most models add a begin token to the prompt that is not in the echoed text."""
    before, after = data.draw(tokens_of(prompt)), data.draw(tokens_of(said))
    places = Places(frozenset({SPECIAL}), prompt=prompt, prompt_tokens=1 + len(before))
    offsets = places.take([SPECIAL, *[1] * len(before + after)], ["<|begin|>", *before, *after])
    assert offsets == [0, *places_in(before), *(len(prompt) + place for place in places_in(after))]


def test_special_tokens_within_a_text_are_counted() -> None:
    """Such as a template's tokens in a prompt, or all of them when none are skipped."""
    ids, texts = [SPECIAL, SPECIAL, 1], ["<|begin|>", "<|user|>", "Hi"]
    lengths = [0, *accumulate(map(len, texts[:-1]))]
    assert Places(frozenset({SPECIAL}), prompt="<|user|>Hi", prompt_tokens=3).take(ids, texts) == [0, 0, 8]
    assert Places(frozenset({SPECIAL}), hides_special=False).take(ids, texts) == lengths


def test_a_prompt_may_lack_its_first_word_s_leading_space() -> None:
    """SentencePiece tokenizers add it."""
    places = Places(frozenset({SPECIAL}), prompt="Hi you", prompt_tokens=3)
    assert places.take([SPECIAL, 1, 2, 3], ["<s>", " Hi", " you", "r"]) == [0, 0, 2, 6]


@given(st.binary(min_size=1, max_size=6))
def test_token_bytes_round_trip(part: bytes) -> None:
    """A text keeps its bytes, whatever they are."""
    assert bytes_of(named(part)) == part
    assert true_bytes(list(named(part).encode())) == list(part)
