r"""A table of each token's text, which vLLM would decode again for each logprob, on the event loop.

Owns the table, and how a token reads that is only a part of characters: `bytes:\xf0\x9f`, as OpenAI's do.  vLLM would
tell such tokens as empty, all alike.  Decoding twenty thousand logprobs took 0.13 s, which would delay every stream.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from transformers.convert_slow_tokenizer import bytes_to_unicode

STRETCH = 256
"""Tokens to decode per loop iteration while filling the table: a few milliseconds."""

_MARK = "bytes:\\x"
_MARK_BYTES = list(_MARK.encode())
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A byte in SentencePiece vocabularies."""
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
"""The bytes in byte-level vocabularies, by the characters that represent them."""

Decode = Callable[[Any, list[int]], list[str]]
"""vLLM's `convert_ids_list_to_tokens`: takes a tokenizer and ids, and decodes each id on its own."""


class TokenTexts:
    """Replaces vLLM's function.  Tokenizers are compared by identity."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts = WeakKeyDictionary[Any, dict[int, str]]()

    def __call__(self, tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, decoding those not in the table."""
        texts = self._texts.setdefault(tokenizer, {})
        new = [token for token in dict.fromkeys(token_ids) if token not in texts]
        if new:
            texts.update(
                (token, _named(tokenizer, token) or text if "\ufffd" in text else text)
                for token, text in zip(new, self._decode(tokenizer, new), strict=True)
            )
        return [texts[token] for token in token_ids]

    async def fill(self, tokenizer: Any, vocabulary: int) -> None:
        """Decode every token, a few per loop iteration.  Not in a thread: tokenizers are not thread-safe."""
        for start in range(0, vocabulary, STRETCH):
            self(tokenizer, range(start, min(start + STRETCH, vocabulary)))
            await asyncio.sleep(0)


def bytes_of(text: str) -> bytes:
    """Return the bytes of a token with this text."""
    if text.startswith(_MARK):
        return bytes.fromhex(text.removeprefix("bytes:").replace("\\x", ""))
    return text.encode("utf-8", errors="replace")


def true_bytes(told: list[int] | None) -> list[int] | None:
    """Return the bytes of a token, given the bytes of its text."""
    return (
        list(bytes_of(bytes(told).decode())) if told is not None and told[: len(_MARK_BYTES)] == _MARK_BYTES else told
    )


def _named(tokenizer: Any, token: int) -> str | None:
    """Return the bytes of a token that cannot be decoded on its own; None if they are unknown."""
    (piece,) = tokenizer.convert_ids_to_tokens([token])
    if not isinstance(piece, str):
        return None
    if (byte := _FALLBACK.fullmatch(piece)) is not None:
        said = bytes.fromhex(byte[1])
    elif _BYTES.keys() >= set(piece):
        said = bytes(_BYTES[character] for character in piece)
    else:
        return None
    try:
        return said.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)
