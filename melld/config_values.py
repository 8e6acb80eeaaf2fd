"""Types of the configuration's values: numbers with bounds, sizes, keys that stay secret, tables of known keys.

Owns no key.
"""

import re
from typing import Annotated

import msgspec

from melld.errors import ConfigError

MIB = 1 << 20
LARGEST_SIZE = 1 << 63
MOST_PRIORITY = 100
"""The largest number of a `priority`: enough to order a machine's clients by, while a time given by mistake is told."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": MIB, "GIB": 1 << 30}

LARGEST_PORT = 65535
Port = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_PORT)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Priority = Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]
PositiveMilliseconds = Annotated[float, msgspec.Meta(gt=0)]
_APPS = "app capacitor chrome-extension ionic moz-extension safari-web-extension tauri vscode-file vscode-webview"
ORIGIN_SCHEMES = {"http": "80", "https": "443"} | dict.fromkeys(_APPS.split(), "")
"""Schemes of web pages, with their default ports, and of apps and extensions that are made of pages."""
DIGEST = "sha256:<64 hex digits>"
SECRET = {"secret": True}
"""Marks a key whose value never appears in an error: it may be an API key."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file; unknown keys are refused and every value is checked."""


def is_address(text: str) -> bool:
    """Return True for HOST:PORT."""
    match = re.fullmatch(r"[^/\s]+:(\d{1,5})", text)
    return match is not None and 0 < int(match[1]) <= LARGEST_PORT


def origin_in(url: str) -> str | None:
    """Return the origin of a URL as browsers send it; None if it has none that a page can have."""
    match = re.match(r"(\w[\w+.-]*)://([\w.-]+|\[[\d:a-f]+\])(?::(\d{1,5}))?(?![^/?#])", url.lower(), re.ASCII)
    if match is None or match[1] not in ORIGIN_SCHEMES or int(match[3] or 0) > LARGEST_PORT:
        return None
    is_default = match[3] in (None, ORIGIN_SCHEMES[match[1]])
    return f"{match[1]}://{match[2]}" + ("" if is_default else f":{match[3]}")


def parse_bytes(size: int | str, where: str) -> int:
    """Return the bytes of an integer or a string such as `"128MiB"`; raise `ConfigError` naming `where` otherwise."""
    if isinstance(size, int):
        value = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(where, f"{size!r} is not a size such as 134217728 or '128MiB'")
        value = int(min(float(match[1]) * _UNITS[match[2].upper()], LARGEST_SIZE))
    if not 0 < value < LARGEST_SIZE:
        raise ConfigError(
            where, f"{str(size)[:40]} is not a size such as 134217728 or '128MiB': above zero, below 8 EiB"
        )
    return value
