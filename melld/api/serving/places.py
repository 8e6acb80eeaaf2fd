"""Offsets of tokens in a text.

Pure.  A token may be part of a character, and special tokens may be left out of the text.
"""

import codecs
from collections.abc import Sequence

from melld.engine.frontend.tokens.texts import bytes_of


class Places:
    """The offsets of one answer's tokens, which come in order."""

    def __init__(
        self, special: frozenset[int], *, hides_special: bool = True, prompt: str = "", prompt_tokens: int = 0
    ) -> None:
        """Expect an answer that begins with this many tokens of the prompt, some of which the text may lack."""
        self._special = special
        self._hides_special = hides_special
        self._prompt = prompt
        self._prompt_tokens = prompt_tokens
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_ids: Sequence[int], texts: Sequence[str]) -> list[int]:
        """Return the offsets of the next tokens, given their texts; part of a character has the character's offset."""
        offsets = []
        for token, text in zip(token_ids, texts, strict=True):
            offsets.append(self._offset)
            if self._prompt_tokens:
                self._pass_in_prompt(token, text)
            elif not (self._hides_special and token in self._special):
                self._offset += len(self._decoder.decode(bytes_of(text)))
        return offsets

    def _pass_in_prompt(self, token: int, text: str) -> None:
        """Advance past a token of the prompt; the text may lack special tokens and the space before its first word."""
        shown = self._decoder.decode(bytes_of(text))
        if not self._prompt.startswith(shown, self._offset):
            shown = "" if token in self._special else shown.lstrip(" ")
        self._offset = min(self._offset + len(shown), len(self._prompt))
        self._prompt_tokens -= 1
        if not self._prompt_tokens:
            self._offset = len(self._prompt)
            self._decoder.reset()
