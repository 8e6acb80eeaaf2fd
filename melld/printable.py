"""Escaping of untrusted text, so that it can neither control a terminal nor forge a log line."""

import re

# Control characters (C0, DEL, C1), line and paragraph separators, the marks and overrides of writing direction,
# invisible characters, and halves of surrogate pairs, which no stream can encode.
_UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` on one line, with unsafe characters escaped as in Python."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_all(value: object) -> object:
    """Return a decoded JSON value with all strings printable, field names included."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_all(one) for one in value]
    if isinstance(value, dict):
        return {printable_all(name): printable_all(one) for name, one in value.items()}
    return value
