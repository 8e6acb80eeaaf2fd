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
    ModelState,
    ModelStatus,
    MoveStatus,
    MovingState,
    Phase,
    RequestStatus,
    ServiceStatus,
    TenantStatus,
    Tier,
    WorkerState,
    WorkerStatus,
)
from melld.scheduler.roles import Role
from tests.docs.configuration_text import descriptions

STRUCTS = (
    DaemonStatus,
    ModelStatus,
    DeviceStatus,
    TenantStatus,
    WorkerStatus,
    ServiceStatus,
    RequestStatus,
    MoveStatus,
    LinkStatus,
)
WORDS = (DaemonState, ModelState, WorkerState, Role, Phase, Tier, MovingState)

INTRODUCTION = f"""\
# What `melld status --json` prints

One JSON object of schema {SCHEMA}; with `--watch` one per line, twice a second. The control socket answers the same:

    curl --unix-socket /run/melld/control.sock http://melld/status

Within one schema number, fields and states may be added; none is removed, renamed or given another meaning. What is
not known is `null`, never 0. Sizes are in bytes, `_s` is seconds, `_ms` milliseconds, `_w` watts, `_c` degrees Celsius;
parts are from 0 to 1.
"""


def schema_text() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *(_struct(kind) for kind in STRUCTS), *(_words(kind) for kind in WORDS)]
    return "\n".join(parts)


def _struct(kind: type[msgspec.Struct]) -> str:
    described = descriptions(kind)
    rows = [
        f"- `{field.name}`{_type_text(field.type)}: {described[field.name]}" for field in msgspec.structs.fields(kind)
    ]
    about = inspect.getdoc(kind) or ""
    return "\n".join([f"## {kind.__name__}\n", *([f"{about}\n"] if len(about.split()) > 4 else []), *rows, ""])


def _type_text(kind: object) -> str:
    """What the name does not say of a type: that it may be null, is a list, true or false, or described below."""
    if isinstance(kind, types.UnionType):
        return f"{_type_text(typing.get_args(kind)[0])} (or null)"
    if typing.get_origin(kind) is tuple:
        return f"{_type_text(typing.get_args(kind)[0])} (a list)"
    if kind in (str, int, float):
        return ""
    return " (true or false)" if kind is bool else f" [{kind.__name__}](#{kind.__name__.lower()})"


def _words(kind: EnumMeta) -> str:
    """An enumeration with the comment behind each of its words."""
    comments = dict(re.findall(r'= "(\w+)"  # (.+)', inspect.getsource(kind)))
    rows = [f"- `{word.value}`: {comments[word.value]}" for word in kind]
    return "\n".join([f"## {kind.__name__}\n", *rows, ""])


if __name__ == "__main__":
    print(schema_text(), end="")  # noqa: T201
