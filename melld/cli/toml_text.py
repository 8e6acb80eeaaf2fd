"""A configuration as TOML that melld reads back to the same configuration.

Owns the writing alone; unset values are left out, as TOML has no null.
"""

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(tables: Mapping[str, Any]) -> str:
    """Write `tables` as TOML: one `[table]` per top-level key, nested tables inline."""
    return "\n".join(_table(name, table) for name, table in tables.items())


def _table(name: str, table: Mapping[str, Any]) -> str:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]
    return "\n".join([f"[{_key(name)}]", *lines, ""])


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return _string(str(value))


def _string(text: str) -> str:
    """Quote `text` as a JSON string, which is a TOML string too, except that TOML wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
