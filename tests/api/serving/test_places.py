"""Where tokens stand in a text, whatever parts of characters they are."""

import codecs
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from melld.api.serving.places import Places
from melld.engine.frontend.token_texts import bytes_of, true_bytes

TEXTS = st.text(st.sampled_from("ab \n\u00e9\u2014\u65e5\U0001f642"), max_size=12)
SPECIAL = 0


def named(part: bytes) -> str:
    """What a token of these bytes reads."""
    try:
        return part.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in part)


@st.composite
def tokens_of(draw: st.DrawFn, text: str) -> list[str]:
    """A text's bytes cut anywhere."""
    whole = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=8))) if whole else []
    return [named(whole[start:end]) for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True) if start < end]


def places_in(tokens: list[str]) -> list[int]:
    """The number of characters that are complete before each token."""
    said = [b"".join(map(bytes_of, tokens[:count])) for count in range(len(tokens))]
    return [len(codecs.decode(one, "utf-8", "ignore")) for one in said]


@given(TEXTS.flatmap(tokens_of), st.data())
def test_a_token_stands_where_its_character_does(tokens: list[str], data: st.DataObject) -> None:
    """Clients cut the text there, however the tokens come in a stream, and special tokens are not in it."""
    mixed = [piece for token in tokens for piece in data.draw(st.sampled_from(([token], [None, token])))]
    ids = [SPECIAL if token is None else 1 for token in mixed]
    texts = [token or "<|end|>" for token in mixed]
    places = Places(frozenset({SPECIAL}))
    cut = data.draw(st.integers(0, len(ids)))
    offsets = places.take(ids[:cut], texts[:cut]) + places.take(ids[cut:], texts[cut:])
    assert [offset for offset, token in zip(offsets, mixed, strict=True) if token is not None] == places_in(tokens)


@given(TEXTS, TEXTS, st.data())
def test_an_echo_counts_no_token_that_its_prompt_lacks(prompt: str, said: str, data: st.DataObject) -> None:
    """The begin token of most models is added to a prompt, and is not in the text that comes back."""
    before, after = data.draw(tokens_of(prompt)), data.draw(tokens_of(said))
    places = Places(frozenset({SPECIAL}), prompt=prompt, prompt_tokens=1 + len(before))
    offsets = places.take([SPECIAL, *[1] * len(before + after)], ["<|begin|>", *before, *after])
    assert offsets == [0, *places_in(before), *(len(prompt) + place for place in places_in(after))]


def test_special_tokens_that_are_in_a_text_are_counted() -> None:
    """Such as those of a template, in a prompt, or all where none are to be skipped."""
    ids, texts = [SPECIAL, SPECIAL, 1], ["<|begin|>", "<|user|>", "Hi"]
    lengths = [0, *accumulate(map(len, texts[:-1]))]
    assert Places(frozenset({SPECIAL}), prompt="<|user|>Hi", prompt_tokens=3).take(ids, texts) == [0, 0, 8]
    assert Places(frozenset({SPECIAL}), hides_special=False).take(ids, texts) == lengths


def test_a_prompt_may_lack_the_space_of_its_first_word() -> None:
    """Tokenizers of SentencePiece add it."""
    places = Places(frozenset({SPECIAL}), prompt="Hi you", prompt_tokens=3)
    assert places.take([SPECIAL, 1, 2, 3], ["<s>", " Hi", " you", "r"]) == [0, 0, 2, 6]


@given(st.binary(min_size=1, max_size=6))
def test_bytes_come_back_as_they_were(part: bytes) -> None:
    """Whatever bytes a token has: a text keeps its own."""
    assert bytes_of(named(part)) == part
    assert true_bytes(list(named(part).encode())) == list(part)
