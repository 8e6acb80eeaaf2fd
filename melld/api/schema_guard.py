"""JSON schemas that a client sends, checked before an engine compiles them.

Pure.  A reference that leads only to references (`{"$ref": "#"}`) describes no text at all, and a compiler that follows
it never ends or dies; a reference to nowhere or to another document cannot be compiled.  A schema that is recursive
in the ordinary way (a tree whose children are trees) is none of these and passes.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from melld.api.answers import Refusal

_MISSING = object()
# Keywords whose schemas apply to the same text as the schema that holds them: following them consumes nothing.
_IN_PLACE = ("allOf", "anyOf", "oneOf")


def check_schema(schema: object, param: str) -> None:
    """Refuse (400) a JSON schema that is none, or whose references lead in a circle or to nowhere."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _invalid("a JSON schema is an object", param)
    settled: set[int] = set()
    for node in _schemas(schema):
        _follow(schema, node, settled, param)


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every object in the schema.  One that is data (an enum's value) and not a schema has no `$ref` but by malice."""
    waiting: list[object] = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _follow(root: dict[str, Any], start: dict[str, Any], settled: set[int], param: str) -> None:
    """Walk depth first, without recursion, what applies in the place of `start`; an ancestor met is a circle."""
    path: list[int] = []
    on_path: set[int] = set()
    waiting: list[tuple[dict[str, Any], bool]] = [(start, True)]
    while waiting:
        node, entering = waiting.pop()
        if not entering:
            on_path.discard(path.pop())
            settled.add(id(node))
            continue
        if id(node) in on_path:
            raise _invalid("a $ref leads back to itself without describing anything", param)
        if id(node) in settled:
            continue
        path.append(id(node))
        on_path.add(id(node))
        waiting.append((node, False))
        waiting.extend((inner, True) for inner in _in_place(root, node, param))


def _in_place(root: dict[str, Any], node: dict[str, Any], param: str) -> Iterator[dict[str, Any]]:
    reference = node.get("$ref")
    if isinstance(reference, str):
        target = _resolve(root, reference, param)
        if isinstance(target, dict):
            yield target
    for keyword in _IN_PLACE:
        several = node.get(keyword)
        if isinstance(several, list):
            yield from (one for one in several if isinstance(one, dict))


def _resolve(root: dict[str, Any], reference: str, param: str) -> object:
    if not reference.startswith("#"):
        raise _invalid(f"$ref {reference[:100]!r} points out of the schema", param)
    pointer = unquote(reference[1:])
    if pointer and not pointer.startswith("/"):
        return _anchor(root, pointer, param)
    found: object = root
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name, _MISSING)
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = _MISSING
        if found is _MISSING:
            raise _invalid(f"$ref {reference[:100]!r} points to nothing", param)
    return found


def _anchor(root: dict[str, Any], name: str, param: str) -> object:
    for node in _schemas(root):
        if node.get("$anchor") == name or node.get("$id") == f"#{name}":
            return node
    raise _invalid(f"$ref '#{name[:100]}' points to nothing", param)


def _invalid(message: str, param: str) -> Refusal:
    return Refusal(400, f"invalid JSON schema: {message}", code="invalid_json_schema", param=param)
