"""Hints for unknown words: the known word that was probably meant."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most like `word`, ignoring case, or None if none is near."""
    words = {one.lower(): one for one in known}
    near = difflib.get_close_matches(word.lower(), words, n=1)
    return words[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'status'?` for an error about `word`, or an empty text if no known word is near."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""
