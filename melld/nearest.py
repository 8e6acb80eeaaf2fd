"""The word that somebody may have meant.

Owns the hint for words that are unknown; decides nothing by it.
"""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like `word`, whatever its case; None where none is near."""
    words = {one.lower(): one for one in known}
    near = difflib.get_close_matches(word.lower(), words, n=1)
    return words[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'status'?` after an error about `word`, or nothing where no known word is near."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""
