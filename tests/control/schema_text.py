"""Write docs/status-schema.md: `python -m tests.control.schema_text > docs/status-schema.md`.

The Structs' own docstrings and comments are the documentation; this lays them out.
"""

import inspect
import re
import types
import typing
from enum import EnumMeta

import msgspec

from melld.control.status import (
    SCHEMA,
    DaemonState,
    DaemonStatus,
    DeviceStatus,
    LinkStatus,
    LoanStatus,
    MachineStatus,
    ModelState,
    ModelStatus,
    MoveStatus,
    MovingState,
    Phase,
    RequestStatus,
    ServiceStatus,
    TenantStatus,
    WorkerState,
    WorkerStatus,
)
from melld.scheduler.priorities import Tier
from melld.scheduler.roles import Role
from tests.docs.configuration_text import descriptions

STRUCTS = (
    DaemonStatus,
    ModelStatus,
    DeviceStatus,
    TenantStatus,
    WorkerStatus,
    LoanStatus,
    ServiceStatus,
    RequestStatus,
    MoveStatus,
    LinkStatus,
    MachineStatus,
)
WORDS = (DaemonState, ModelState, WorkerState, Role, Phase, Tier, MovingState)

INTRODUCTION = f"""\
# What `melld status --json` prints

One JSON object; with `--watch`, one per line, twice a second. The control socket returns the same:

    curl --unix-socket /run/melld/control.sock http://melld/status

This is schema {SCHEMA}. Fields and states may be added; none is removed, renamed or given another meaning. `[]` marks a
list, `?` a field that is `null` when unknown. Names end in their unit: `_bytes`, `_s` seconds, `_w` watts, `_c` degrees
Celsius. Fractions range from 0 to 1; a reason is empty when all is well.
"""


def schema_text() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION, *(_struct(kind) for kind in STRUCTS), *(_words(kind) for kind in WORDS)]
    return "\n".join(parts)


def _struct(kind: type[msgspec.Struct]) -> str:
    described = descriptions(kind)
    rows: list[str] = []
    plain = ""
    for field in msgspec.structs.fields(kind):
        shown = f"`{field.name}{_marks(field.type)}`{_link(field.type)}"
        if (text := described.get(field.name)) is not None:
            rows.append(f"- {shown}: {text}")
        elif plain and rows[-1] == plain:
            rows[-1] += f", {shown}"
        else:
            rows.append(f"- {shown}")
        plain = rows[-1] if text is None else ""
    about = inspect.getdoc(kind) or ""
    return "\n".join([f"## {kind.__name__}\n", *([f"{about}\n"] if len(about.split()) > 4 else []), *rows, ""])


def _marks(kind: object) -> str:
    """Return the suffix of a field that may be null or is a list."""
    if isinstance(kind, types.UnionType):
        return f"{_marks(typing.get_args(kind)[0])}?"
    return "[]" if typing.get_origin(kind) is tuple else ""


def _link(kind: object) -> str:
    """Return a link to the field type's description, if it is on this page."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is tuple:
        return _link(typing.get_args(kind)[0])
    return "" if kind in (str, int, float, bool) else f" [{kind.__name__}](#{kind.__name__.lower()})"  # type: ignore[attr-defined]


def _words(kind: EnumMeta) -> str:
    """Return an enumeration with the comment on each of its values."""
    comments = dict(re.findall(r'= "(\w+)"  # (.+)', inspect.getsource(kind)))
    rows = [f"- `{word.value}`: {comments[word.value]}" for word in kind]
    return "\n".join([f"## {kind.__name__}\n", *rows, ""])


if __name__ == "__main__":
    print(schema_text(), end="")  # noqa: T201
