"""Token texts are cached: the same as vLLM's, and decoded once."""

from typing import Any

import transformers

from melld.engine.frontend.tokens.texts import TokenTexts, bytes_of


class Decoder:
    """Decodes each id alone, as vllm.tokenizers.detokenizer_utils.convert_ids_list_to_tokens, and counts."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def __call__(self, tokenizer: Any, token_ids: list[int]) -> list[str]:
        self.decoded += token_ids
        return [tokenizer.decode([token]) for token in token_ids]


async def test_a_token_is_decoded_once_and_to_vllm_s_text(demo_model: Any) -> None:
    """Log-probabilities of a long prompt no longer hold up everybody's streams, and read as before."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    decoder = Decoder()
    texts = TokenTexts(decoder)
    asked = [5, 7, 5, 300, 7]
    assert texts(tokenizer, asked) == [tokenizer.decode([token]) for token in asked]
    assert decoder.decoded == [5, 7, 300]
    await texts.fill(tokenizer, 1000)
    assert sorted(decoder.decoded) == list(range(1000))
    decoded = [tokenizer.decode([token]) for token in range(1000)]
    assert len(decoder.decoded) == 1000
    for text, plain in zip(texts(tokenizer, range(1000)), decoded, strict=True):
        assert text == plain or "\ufffd" in plain


async def test_partial_characters_are_distinct_and_join_to_the_text(demo_model: Any) -> None:
    """In vLLM's form all of them are empty, and alternatives hide each other."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    text = "x\U0001f642\u65e5\u672c\u00e9 \u2014"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    told = TokenTexts(Decoder())(tokenizer, tokens)
    assert len(told) > len(text)
    assert b"".join(map(bytes_of, told)) == text.encode()
    parts = [one for one in TokenTexts(Decoder())(tokenizer, range(len(tokenizer))) if one.startswith("bytes:")]
    assert len(parts) == len(set(parts)) > 100


class Pieces:
    """A tokenizer of SentencePiece's kind, or of one that shows no bytes."""

    def __init__(self, *pieces: str | None) -> None:
        self._pieces = pieces

    def decode(self, tokens: list[int]) -> str:
        return "\ufffd"

    def convert_ids_to_tokens(self, tokens: list[int]) -> list[str | None]:
        return [self._pieces[token] for token in tokens]


def test_bytes_are_found_in_other_vocabularies_or_left_to_vllm() -> None:
    """A vocabulary that names its bytes differently reads as before."""
    pieces = "<0xE2>", "\u2581<x>", None, "\u00ef\u00bf\u00bd"
    told = TokenTexts(Decoder())(Pieces(*pieces), range(4))
    assert told == ["bytes:\\xe2", "\ufffd", "\ufffd", "\ufffd"]
