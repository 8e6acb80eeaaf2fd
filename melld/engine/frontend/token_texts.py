"""A table of each token's text, which vLLM would decode again for each logprob, on the event loop.

Owns the table.  Decoding twenty thousand logprobs took 0.13 s, which would delay every stream.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

STRETCH = 256
"""Tokens to decode in one turn of the event loop while filling the table: some milliseconds."""

Decode = Callable[[Any, list[int]], list[str]]
"""vLLM's `convert_ids_list_to_tokens`: the text of each id by itself, for a tokenizer and ids."""


class TokenTexts:
    """A replacement of vLLM's function.  Tokenizers are told apart by identity, and live as long as the process."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, dict[int, str]] = {}

    def __call__(self, tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, decoding those not in the table."""
        texts = self._texts.setdefault(id(tokenizer), {})
        new = [token for token in dict.fromkeys(token_ids) if token not in texts]
        if new:
            texts.update(zip(new, self._decode(tokenizer, new), strict=True))
        return [texts[token] for token in token_ids]

    async def fill(self, tokenizer: Any, vocabulary: int) -> None:
        """Decode every token, some in each turn of the loop.  Not in a thread: tokenizers are not thread-safe."""
        for start in range(0, vocabulary, STRETCH):
            self(tokenizer, range(start, min(start + STRETCH, vocabulary)))
            await asyncio.sleep(0)
