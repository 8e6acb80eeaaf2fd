"""Texts of tokens, kept: the same as vLLM's, and decoded once."""

from typing import Any

import transformers

from melld.engine.frontend.token_texts import TokenTexts


class Decoder:
    """Decodes each id by itself, as vllm.tokenizers.detokenizer_utils.convert_ids_list_to_tokens, and counts."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def __call__(self, tokenizer: Any, token_ids: list[int]) -> list[str]:
        self.decoded += token_ids
        return [tokenizer.decode([token]) for token in token_ids]


async def test_a_token_is_decoded_once_and_says_what_it_says_by_itself(demo_model: Any) -> None:
    """Log-probabilities of a long prompt no longer hold up everybody's streams, and read as they did."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    decoder = Decoder()
    texts = TokenTexts(decoder)
    asked = [5, 7, 5, 300, 7]
    assert texts(tokenizer, asked) == [tokenizer.decode([token]) for token in asked]
    assert decoder.decoded == [5, 7, 300]
    await texts.fill(tokenizer, 1000)
    assert sorted(decoder.decoded) == list(range(1000))
    assert texts(tokenizer, range(1000)) == [tokenizer.decode([token]) for token in range(1000)]
    assert len(decoder.decoded) == 1000
