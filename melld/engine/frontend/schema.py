"""Checks a client's JSON schema before anything compiles it.

Pure, and linear in the schema.  A reference that leads only to references (`{"$ref": "#"}`) describes no text, and a
compiler that follows it loops or overflows its stack; a reference to nowhere or to another document cannot be
compiled.  An ordinary recursive schema (a tree whose children are trees) passes.
"""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from melld.errors import InvalidSchema, TooManyValues
from melld.nested import containers

MAX_VALUES = 20_000
JOINT_VALUES = 4
"""Cost of following one reference or one list of alternatives."""
MAX_REFERENCE_CHARACTERS = 1024
_MISSING = object()
# Keywords whose schemas apply to the same text as the enclosing schema: following them consumes no text.
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_JOINTS = frozenset({"$ref", *_IN_PLACE})


class Budget:
    """Caps the objects and lists that guards visit per request, so that none blocks its thread for long."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def spend(self, values: int, param: str) -> None:
        """Count values about to be visited.

        Raises:
            TooManyValues: the request holds more than may be visited.
        """
        self._left -= values
        if self._left < 0:
            raise TooManyValues(param, MAX_VALUES)


def check_schema(schema: object, param: str, budget: Budget) -> None:
    """Refuse a schema that is not a JSON object, or whose references form a cycle or lead nowhere.

    Raises:
        InvalidSchema: gives the reason.
        TooManyValues: the schema is too large.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidSchema("a JSON schema must be an object", param)
    _Check(schema, param, budget).run()


class _Check:
    """A schema being checked."""

    def __init__(self, root: dict[str, Any], param: str, budget: Budget) -> None:
        self._root = root
        self._param = param
        self._nodes = list(_objects(root, param, budget))
        self._joints = [node for node in self._nodes if not _JOINTS.isdisjoint(node)]
        budget.spend(JOINT_VALUES * len(self._joints), param)
        self._anchors = {name: node for node in self._nodes for name in _anchors(node)}

    def run(self) -> None:
        """Follow the in-place references of every object, including those in an enum's value, which is data."""
        applied = {id(node): [id(one) for one in self._in_place(node)] for node in self._joints}
        try:
            TopologicalSorter(applied).prepare()
        except CycleError:
            raise InvalidSchema("a $ref refers to itself without describing anything", self._param) from None

    def _in_place(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        reference = node.get("$ref")
        if isinstance(reference, str):
            target = self._resolve(reference)
            if isinstance(target, dict):
                yield target
        for keyword in _IN_PLACE:
            if isinstance(several := node.get(keyword), list):
                yield from (one for one in several if isinstance(one, dict))

    def _resolve(self, reference: str) -> object:
        if len(reference) > MAX_REFERENCE_CHARACTERS:
            raise InvalidSchema(f"a $ref is longer than {MAX_REFERENCE_CHARACTERS} characters", self._param)
        if not reference.startswith("#"):
            raise InvalidSchema(f"$ref {reference[:100]!r} points outside the schema", self._param)
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            found = self._anchors.get(pointer, _MISSING)
        else:
            found = _pointed_to(self._root, pointer)
        if found is _MISSING:
            raise InvalidSchema(f"$ref {reference[:100]!r} does not resolve", self._param)
        return found


def _objects(root: dict[str, Any], param: str, budget: Budget) -> Iterator[dict[str, Any]]:
    for value in containers(root):
        budget.spend(1 + len(value), param)
        if isinstance(value, dict):
            yield value


def _anchors(node: dict[str, Any]) -> Iterator[str]:
    anchor, name = node.get("$anchor"), node.get("$id")
    if isinstance(anchor, str):
        yield anchor
    if isinstance(name, str) and name.startswith("#"):
        yield name[1:]


def _pointed_to(root: dict[str, Any], pointer: str) -> object:
    found: object = root
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name, _MISSING)
        elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return _MISSING
    return found
