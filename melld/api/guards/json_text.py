"""Parses a body into a JSON object that is safe to pass on.

Pure.  Refuses what Python's parser accepts and later layers fail on: values that JSON does not have (NaN, Infinity),
numbers beyond a double or 64 bits, halves of surrogate pairs, a key twice in one object (two parsers would disagree
about its value), nesting that exhausts a recursive reader, and so many values that the parser, which is written in C,
would block every other thread for long.
"""

import collections
import json
import math
from typing import Any, Never

import numpy as np

from melld.api.answers import Refusal

MAX_CONTAINERS = 50_000
"""Objects and lists in a body."""
MAX_VALUES = 300_000
"""Values in a body: more than the tokens of any prompt."""
MAX_ESCAPES = 1_500_000
"""Backslashes in a body: room for 8 MiB of text in which every character is escaped as `\\uXXXX`."""
_PIECE_BYTES = 1 << 20
_INTEGERS = range(-(2**63), 2**64)
# Signs of what only a slow walk can check: halves of pairs, long integers, large exponents.  With every digit replaced
# by 0, and D and E by small letters, each sign is a fixed string, which is found at the speed of memory.
_FLATTENED = bytes.maketrans(b"123456789DE", b"000000000de")
_SUSPECTS = (b"\\ud", b"0" * 19, b"e000", b"e+000")


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Return the JSON object in `body`.

    Raises:
        Refusal: 400, with the top-level key at fault, if any, as `param`.
    """
    if not body.strip():
        raise _malformed("the body is empty")
    _check_amount(body)
    try:
        text = body.decode("utf-8-sig")  # editors on Windows put a byte order mark before it
        value = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise _malformed("the body is not UTF-8") from error
    except RecursionError as error:
        raise _malformed(f"the body is nested deeper than {max_depth}") from error
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is not JSON: {error}") from error
    except ValueError as error:
        raise _malformed("the body contains a number that is too large") from error
    if not isinstance(value, dict):
        raise _malformed("the body is not a JSON object")
    flattened = body.translate(_FLATTENED)
    careful = any(suspect in flattened for suspect in _SUSPECTS)
    if careful or body.count(b"[") + body.count(b"{") > max_depth:
        for key, item in value.items():
            _check(key, item, max_depth, careful)
    return value


def _check_amount(body: bytes) -> None:
    """Limit escapes, containers and values before parsing: first by a quick count that includes text in strings."""
    if body.count(b"\\") > MAX_ESCAPES:
        raise _malformed(f"the body contains more than {MAX_ESCAPES} escapes: send UTF-8")
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS and body.count(b",") <= MAX_VALUES:
        return
    plain = np.frombuffer(body.replace(rb"\\", b"").replace(b'\\"', b""), np.uint8)
    containers = separators = 0
    in_text = np.False_
    for start in range(0, len(plain), _PIECE_BYTES):
        piece = plain[start : start + _PIECE_BYTES]
        is_text = np.logical_xor.accumulate(piece == ord('"')) ^ in_text
        in_text = is_text[-1]
        structure = piece[~is_text]
        containers += int(np.count_nonzero((structure == ord("[")) | (structure == ord("{"))))
        separators += int(np.count_nonzero(structure == ord(",")))
        if containers > MAX_CONTAINERS:
            raise _malformed(f"the body contains more than {MAX_CONTAINERS} objects and lists")
        if separators > MAX_VALUES:
            raise _malformed(f"the body contains more than {MAX_VALUES} values")


def _check(key: str, root: object, max_depth: int, careful: bool) -> None:
    """Walk one top-level value without recursion."""
    if careful:
        _check_text(key, None)
    waiting = [(root, 2)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, (dict, list)):
            if depth > max_depth:
                raise _malformed(f"the body is nested deeper than {max_depth}", key)
            if isinstance(value, dict) and careful:
                for name in value:
                    _check_text(name, key)
            inner = value.values() if isinstance(value, dict) else value
            waiting.extend((item, depth + 1) for item in inner if careful or isinstance(item, (dict, list)))
        elif isinstance(value, str):
            _check_text(value, key)
        elif isinstance(value, float) and not math.isfinite(value):
            raise _malformed("a number is outside the range of a double", key)
        elif isinstance(value, int) and value not in _INTEGERS:
            raise _malformed("an integer exceeds 64 bits", key)


def _check_text(text: str, param: str | None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _malformed("a string contains an unpaired surrogate", param) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _malformed(f"the key {twice[:64]!r} appears twice in one object", twice[:64])
    return found


def _refuse_constant(name: str) -> Never:
    raise _malformed(f"{name} is not a JSON value")


def _malformed(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, message, code="invalid_json", param=param)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
