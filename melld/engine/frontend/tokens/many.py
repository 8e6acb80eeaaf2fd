"""Decodes the tokens that have come in one go; vLLM steps through each, with what may be part of a character."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

_BROKEN = "\ufffd"
"""Stands for bytes that are no character, or not yet."""


class ManyTokens(FastIncrementalDetokenizer):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """vLLM's detokenizer for tokens that are bytes: between two characters, what comes next depends on nothing before.

    Its text is that of vLLM, which holds back what may be part of a character.
    """

    _is_between = False
    """Whether all tokens so far are in the text."""

    def text_of(self, token_ids: list[int]) -> str | None:
        """Return the text of the next tokens if they are whole characters, and nothing before them is left."""
        try:
            text: str = self.tokenizer.decode(token_ids, self.skip_special_tokens) if self._is_between else ""
        except (OverflowError, TypeError):  # no token: vLLM leaves it out
            return None
        return text if text and not text.endswith(_BROKEN) else None

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """See vLLM."""
        if len(new_token_ids) > 1 and not (stop_terminated or self.stop) and (text := self.text_of(new_token_ids)):
            self.token_ids.extend(new_token_ids)
            self.output_text += text
            return None
        stop: str | None = super().update(new_token_ids, stop_terminated)
        return stop

    def decode_next(self, next_token_id: int) -> str:
        """See vLLM."""
        if (text := self.text_of([next_token_id])) is None:
            text = super().decode_next(next_token_id)
            self._is_between = bool(text)
        return text


def decode_many(detokenizer: Any) -> None:
    """Make a request's new detokenizer decode many tokens in one go, if its tokens are bytes."""
    if type(detokenizer) is not FastIncrementalDetokenizer or not detokenizer.spaces_between_special_tokens:
        return
    tokenizer = detokenizer.tokenizer
    if type(tokenizer) is Tokenizer and type(tokenizer.decoder) is ByteLevel:
        detokenizer.__class__ = ManyTokens
