"""Writes docs/configuration.md from the Structs of `melld.config`: `python -m tests.docs.configuration_text`.

A key is described by the docstring under its field, bounded by its annotation, and shown with its default.
"""

import ast
import inspect
import itertools
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from melld.cli.check_config import toml_text
from melld.cli.config_flags import PLAIN_FLAGS
from melld.config import Config

ROOT = Path(__file__).parents[2]
INTRODUCTION = """\
# Configuration

One TOML file: `melld serve --config FILE`, else `./melld.toml`, else in the service manager's
`$CONFIGURATION_DIRECTORY`. Flags override it: those in brackets below, and `--set TABLE.KEY=VALUE` for any key. An
unknown key or a wrong value refuses to start and says where. `python -m tests.docs.configuration_text` writes this page
from `melld/config.py`.

```sh
melld check-config --model .demo-model
melld check-config --model .demo-model --set server.drain_s=5 --json --quick
```

The first asks vLLM too, for some seconds, and shows what is in force; the second, for programs, leaves vLLM out. A
running daemon reads the file again on SIGHUP (`systemctl reload melld`): keys marked **Reloads** change then, the
others at the next start. A size is a number of bytes or a string such as `"128MiB"` (KB, MB, GB, KiB, MiB, GiB).

Several models: `[[models]]` for each in place of `[model]`, with the same keys: [several-models.md](several-models.md).
"""
WORDS = {str: "string", int: "integer", float: "number", bool: "true or false"}
# The flags that make a key's value out of shorter words.
SHORT_FLAGS = {
    "devices.cuda": "`--device cuda:0,1`",
    "devices.cpu.count": "`--device cpu:2`",
    "devices.cpu.kv_bytes": "`--kv-bytes 128MiB`",
}


def configuration_text() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_table(name, kind) for name, kind in tables("", Config) if name)])


def tables(name: str, kind: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every table of the file by its dotted name, the whole file first (its name is empty)."""
    yield name, kind
    for field in msgspec.structs.fields(kind):
        inner = _struct_in(field.type)
        if inner is not None and typing.get_origin(field.type) is not tuple:  # [[models]] has the keys of [model]
            yield from tables(f"{name}.{field.name}".lstrip("."), inner)


def keys(kind: type[msgspec.Struct]) -> list[msgspec.structs.FieldInfo]:
    """The keys of a table that are no tables themselves."""
    return [field for field in msgspec.structs.fields(kind) if _struct_in(field.type) is None]


def descriptions(kind: type) -> dict[str, str]:
    """The docstring under each field."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def reloadable() -> frozenset[str]:
    """The keys that a running daemon takes over, as its source lists them."""
    for node in ast.parse((ROOT / "melld" / "daemon/settings.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RELOADABLE":
            return frozenset(ast.literal_eval(node.value))
    raise AssertionError("melld/daemon/settings.py lists no RELOADABLE keys")


def _table(name: str, kind: type[msgspec.Struct]) -> str:
    described, changing, flags = descriptions(kind), reloadable(), {key: flag for flag, key in PLAIN_FLAGS.items()}
    rows = []
    for field in keys(kind):
        dotted = f"{name}.{field.name}"
        flag = SHORT_FLAGS.get(dotted) or (f"`{flags[dotted]}`" if dotted in flags else "")
        live = "**Reloads.**" if dotted in changing else ""
        meaning = " ".join(filter(None, [described[field.name], flag and f"({flag})", live]))
        cells = (f"`{field.name}`", _type_text(field.type), _default(field), meaning)
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    head = "| key | value | default | meaning |\n|---|---|---|---|"
    about = " ".join((kind.__doc__ or "").split())
    return "\n".join([f"## `[{name}]`\n", f"{about}\n", head, *rows, ""])


def _struct_in(kind: object) -> type[msgspec.Struct] | None:
    for one in (kind, *typing.get_args(kind)):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return one
    return None


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return _value(field.default_factory())
    return "(needed)" if field.default is msgspec.NODEFAULT else _value(field.default)


def _value(value: object) -> str:
    if value is None:
        return "(unset)"
    if isinstance(value, tuple | list | dict) and not value:
        return "`{}`" if isinstance(value, dict) else "`[]`"
    return f"`{toml_text({'key': value}).removeprefix('key = ').rstrip()}`"


def _type_text(kind: object) -> str:
    """A type in TOML's words, with its bounds."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        return " or ".join(_type_text(part) for part in parts)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type_text(arguments[0]) + "".join(_bounds(meta) for meta in arguments[1:])
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    if origin is typing.Literal:
        return " or ".join(f'`"{word}"`' for word in arguments)
    if origin is dict:
        return "table"
    return WORDS[typing.cast("type", kind)]


def _bounds(meta: msgspec.Meta) -> str:
    limits = (("from", meta.ge), ("above", meta.gt), ("to", meta.le), ("below", meta.lt))
    return "".join(
        f" {word} {limit:g}" if limit >= 1000 else f" {word} {limit}" for word, limit in limits if limit is not None
    )


if __name__ == "__main__":
    (ROOT / "docs" / "configuration.md").write_text(configuration_text())
