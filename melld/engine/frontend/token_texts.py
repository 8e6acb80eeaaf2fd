"""The text of each token by itself, kept: vLLM decodes it anew for each log-probability that it tells, on the loop.

Owns the table.  Twenty thousand log-probabilities took 0.13 s to decode, which nobody's tokens should wait for.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

STRETCH = 256
"""Tokens that are decoded in one turn of the loop while the table is filled: some milliseconds."""

Decode = Callable[[Any, list[int]], list[str]]
"""vLLM's `convert_ids_list_to_tokens`: of a tokenizer and ids, each by itself."""


class TokenTexts:
    """Stands where vLLM's function does, for one tokenizer."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}

    def __call__(self, tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; one that is not known yet is decoded."""
        new = [token for token in dict.fromkeys(token_ids) if token not in self._texts]
        if new:
            self._texts.update(zip(new, self._decode(tokenizer, new), strict=True))
        return [self._texts[token] for token in token_ids]

    async def fill(self, tokenizer: Any, vocabulary: int) -> None:
        """Decode every token, a stretch in each turn of the loop.  Not in a thread: tokenizers are not made for two."""
        for start in range(0, vocabulary, STRETCH):
            self(tokenizer, range(start, min(start + STRETCH, vocabulary)))
            await asyncio.sleep(0)
