"""Write docs/configuration.md from the Structs of `melld.config`: `python -m tests.docs.configuration_text`.

A key is described by the docstring under its field, bounded by its annotation, and shown with its default.
"""

import ast
import functools
import inspect
import itertools
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from melld.cli.check_config import toml_text
from melld.cli.config_flags import PLAIN_FLAGS
from melld.cli.vllm_flags import OF_SERVER
from melld.config import Config

ROOT = Path(__file__).parents[2]
INTRODUCTION = """\
# Configuration

melld reads one TOML file: `melld serve --config FILE`, or `./melld.toml`, or `melld.toml` in the service manager's
`$CONFIGURATION_DIRECTORY`. Flags override it: those listed below, and `--set TABLE.KEY=VALUE` for any key. If a key is
unknown or a value is invalid, melld refuses to start and says where.

```sh
melld check-config --model .demo-model --set server.drain_s=5
```

prints the effective configuration. Keys marked *reloads* take effect on SIGHUP (`systemctl reload melld`), the others
at the next start. Sizes are a number of bytes or a string such as `"128MiB"`; seconds may be `inf`, meaning never.

To serve [several models](several-models.md), write one `[[models]]` table per model, with the keys of `[model]`. A
reload adds and removes models.
"""
LARGEST_PORT = 65535
WORDS = {str: "string", int: "integer", float: "number", bool: "true or false"}
# The flags that make a key's value out of shorter words.
SHORT_FLAGS = {
    "devices.cuda": "`--device cuda:0,1`",
    "devices.cpu.count": "`--device cpu:2`",
    "devices.cpu.kv_bytes": "`--kv-bytes 128MiB`",
}


def configuration_text() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *(_table(name, kind) for name, kind in tables("", Config) if name)])


def tables(name: str, kind: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Return every table of the file by its dotted name, the whole file first (its name is empty)."""
    yield name, kind
    for field in msgspec.structs.fields(kind):
        inner = _struct_in(field.type)
        if inner is not None and typing.get_origin(field.type) is not tuple:  # [[models]] has the keys of [model]
            yield from tables(f"{name}.{field.name}".lstrip("."), inner)


def keys(kind: type[msgspec.Struct]) -> list[msgspec.structs.FieldInfo]:
    """Return a table's keys that are not tables themselves."""
    return [field for field in msgspec.structs.fields(kind) if _struct_in(field.type) is None]


@functools.cache
def descriptions(kind: type) -> dict[str, str]:
    """Return the docstring under each field."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def reloadable() -> frozenset[str]:
    """Return the keys that a running daemon reloads, as its source lists them."""
    for node in ast.parse((ROOT / "melld" / "daemon/settings.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RELOADABLE":
            return frozenset(ast.literal_eval(node.value))
    raise AssertionError("melld/daemon/settings.py lists no RELOADABLE keys")


def _table(name: str, kind: type[msgspec.Struct]) -> str:
    described, changing, flags = descriptions(kind), reloadable(), {key: flag for flag, key in PLAIN_FLAGS.items()}
    flags |= {f"server.{option}": f"--{option.replace('_', '-')}" for option in OF_SERVER}
    rows = []
    for field in keys(kind):
        dotted = f"{name}.{field.name}"
        flag = SHORT_FLAGS.get(dotted) or (f"`{flags[dotted]}`" if dotted in flags else "")
        default = _default(field)
        value = _type_text(field.type, named=default in ("", " = {}", " = []"))
        remarks = "; ".join(filter(None, [value, flag, "reloads" if dotted in changing else ""]))
        rows.append(f"- `{field.name}{default}`{remarks and f' ({remarks})'}: {described[field.name]}")
    about = " ".join((kind.__doc__ or "").split())
    return "\n".join([f"## `[{name}]`\n", *([f"{about}\n"] if len(about.split()) > 5 else []), *rows, ""])


def _struct_in(kind: object) -> type[msgspec.Struct] | None:
    for one in (kind, *typing.get_args(kind)):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return one
    return None


def _default(field: msgspec.structs.FieldInfo) -> str:
    """Return the key's default as the file would have it; nothing for required or unset keys."""
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is None or value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, tuple | list) or value == {}:
        return f" = {json.dumps(value)}"
    return f" = {toml_text({'key': value}).removeprefix('key = ').rstrip()}"


def _type_text(kind: object, named: bool = True) -> str:
    """Return a type in TOML's words, with its bounds; only the bounds where the default shows the type."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        named = named or any(typing.get_origin(part) is typing.Literal for part in parts)  # or one would seem to be all
        return " or ".join(filter(None, (_type_text(part, named) for part in parts)))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return (_type_text(arguments[0], named) + "".join(_bounds(meta) for meta in arguments[1:])).strip()
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    if origin is typing.Literal:
        return " or ".join(f'`"{word}"`' for word in arguments)
    if origin is dict:
        return "table"
    if _struct_in(kind) is not None:
        return "tables"
    return WORDS[typing.cast("type", kind)] if named else ""


def _bounds(meta: msgspec.Meta) -> str:
    """Return a value's limits, except the obvious ones: nothing below 0, and counts from 1."""
    if meta.lt is None and meta.le in (None, LARGEST_PORT) and (meta.ge in (0, 1) or meta.gt == 0):
        return ""
    limits = (("from", meta.ge), ("above", meta.gt), ("to", meta.le), ("below", meta.lt))
    return "".join(
        f" {word} {limit:g}" if limit >= 1000 else f" {word} {limit}" for word, limit in limits if limit is not None
    )


if __name__ == "__main__":
    (ROOT / "docs" / "configuration.md").write_text(configuration_text())
