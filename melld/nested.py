"""Walks over parsed JSON, however deep it is nested: without recursion, and no further than the caller asks."""

from collections.abc import Iterator
from typing import Any


def containers(root: object, *, besides: tuple[str, ...] = ()) -> Iterator[dict[str, Any] | list[Any]]:
    """Yield the object or list and all those inside, but none under the names `besides`."""
    waiting = [root] if isinstance(root, dict | list) else []
    while waiting:
        value = waiting.pop()
        yield value
        inner = (one for name, one in value.items() if name not in besides) if isinstance(value, dict) else value
        waiting.extend(one for one in inner if isinstance(one, dict | list))
