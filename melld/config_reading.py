"""Converts tables of a TOML file into frozen Structs; a mistake gives one line with what is allowed and an example.

Owns the error texts and the short forms: one value where a list is wanted, or in place of a Struct that names the key
for it (`short_form`).  Knows no key by name: all texts come from the Structs (`hint`: what to do with keys that a
Struct lacks) and their annotations.
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from melld.errors import ConfigError
from melld.nearest import did_you_mean

T = TypeVar("T", bound=msgspec.Struct)
LONGEST_VALUE = 60
LARGEST_WHOLE = 1 << 63
_NOT_UTF8 = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair: a byte of a flag that is not UTF-8."""
TO_WORKERS = {"model", "models"}
"""Tables that workers hear of, in messages, which are UTF-8."""


def read_tables(tables: dict[str, Any], kind: type[T], where: str) -> T:
    """Return the Struct that `tables` describes.

    Raises:
        ConfigError: a key is unknown or missing, a value is of the wrong kind or out of range.
    """
    known = _known(kind)
    try:
        read = msgspec.convert(_in_full(tables, known), kind)
        if (odd := _odd(tables, known)) is not None:
            raise ConfigError(where, _wanted(list(odd), tables, known))
        return read
    except msgspec.ValidationError as error:
        raise ConfigError(where, _in_plain_words(str(error), tables, known)) from error


@functools.cache
def _known(kind: type) -> inspect.Type:
    """Return what such a table may contain; cached, as all tables together take ten milliseconds."""
    return inspect.type_info(kind)


def _odd(value: Any, kind: inspect.Type, path: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """Return the key of a value that no system call or message takes: more than 64 bits, a NUL, what is not UTF-8."""
    if isinstance(value, dict):
        kinds = {field.encode_name: field.type for part in _structs(kind) for field in part.fields}
        found = (_odd(one, kinds[key], (*path, key)) for key, one in value.items() if key in kinds)
    elif isinstance(value, list | tuple):
        found = (_odd(one, kind, path) for one in value)
    elif isinstance(value, str):
        return path if "\0" in value or (TO_WORKERS.intersection(path[:1]) and _NOT_UTF8.search(value)) else None
    else:
        return path if isinstance(value, int) and abs(value) >= LARGEST_WHOLE else None
    return next((one for one in found if one is not None), None)


# -- short forms -----------------------------------------------------------------------------------------------------


def _in_full(value: Any, kind: inspect.Type) -> Any:
    """Return the value with its short forms expanded; wrong values stay as written, for the error."""
    plain = [_bare(part) for part in _alternatives(kind)]
    struct = next((part for part in plain if isinstance(part, inspect.StructType)), None)
    is_list = any(isinstance(part, inspect.VarTupleType) for part in plain)
    if struct is not None:
        short = getattr(struct.cls, "short_form", None)
        if short is not None and type(value) in (int, str):
            return {short: value}
        if isinstance(value, dict):
            kinds = {field.encode_name: field.type for field in struct.fields}
            return {key: _in_full(one, kinds[key]) if key in kinds else one for key, one in value.items()}
    if is_list and type(value) in (str, int) and not any(isinstance(part, inspect.StrType) for part in plain):
        return [value]
    if is_list and isinstance(value, list):
        item = next(part.item_type for part in plain if isinstance(part, inspect.VarTupleType))
        return [_in_full(one, item) for one in value]
    return value


# -- what is wrong, in words -----------------------------------------------------------------------------------------


def _in_plain_words(message: str, tables: dict[str, Any], known: inspect.Type) -> str:
    """Reword msgspec's ``Expected `int`, got `str` - at `$.server.port` `` as: key, what is allowed, what was given."""
    what, _, place = message.partition(" - at `$")
    path = re.sub(r"\[[^\]]*\]", "", place).strip("`.").split(".") if place.strip("`") else []
    if (found := re.search(r"unknown field `(.*)`", what)) is not None:
        return _unknown_key(found[1], path, known)
    if (lacking := re.search(r"missing required field `(.*)`", what)) is not None:
        if path == ["models"]:
            return f"[[models]] is missing `{lacking[1]}`"
        if path not in ([], ["model"]):
            return f"[{'.'.join(path)}] is missing `{lacking[1]}`"
        return "no model given: use `--model DIR` or `[model] path = ...` (`melld demo-model DIR` creates a small one)"
    return _wanted(path, tables, known)


def _wanted(path: list[str], tables: dict[str, Any], known: inspect.Type) -> str:
    """Say what the key at `path` accepts, and what it has."""
    kind, value = _at(known, path), tables
    for name in path:
        value = _below(value, name)
    several = "; for several models use [[models]]" if path == ["model"] and isinstance(value, list) else ""
    given = "what is there" if _is_secret(kind) else _toml(value)
    return f"[{'.'.join(path)}] wants {_allowed(kind)}, such as {_example(known, path)}, not {given}{several}"


def _below(value: Any, name: str) -> Any:
    """Return the value of a key of a table, or of each table in a list; return other values unchanged."""
    if isinstance(value, list):
        found = [below for one in value if (below := _below(one, name)) is not None]
        return found[0] if len(found) == 1 else found
    return value.get(name) if isinstance(value, dict) else value


def _unknown_key(key: str, path: list[str], known: inspect.Type) -> str:
    kind = _at(known, path)
    names = [field.encode_name for field in _struct(kind).fields]
    homes = [table for table, fields in _tables(known, "") if key in fields]
    hint = f"; it belongs to [{homes[0]}]" if homes else did_you_mean(key, names)
    hint = f"{hint or '; available: ' + ', '.join(names)}{getattr(_struct(kind).cls, 'hint', '')}"
    where = "[[models]] " if path == ["models"] else f"[{'.'.join(path)}] " if path else ""
    return f"{where}unknown key `{key}`{hint}"


def _tables(kind: inspect.Type, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield every table below `kind` by its dotted name, with its keys."""
    for field in _struct(kind).fields:
        if any(isinstance(_bare(part), inspect.StructType) for part in _alternatives(field.type)):
            inner = f"{name}.{field.encode_name}".lstrip(".")
            yield inner, [one.encode_name for one in _struct(field.type).fields]
            yield from _tables(field.type, inner)


def _allowed(kind: inspect.Type) -> str:
    return " or ".join(_kind_in_words(_bare(part)) for part in _alternatives(kind))


def _kind_in_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number{_bounds(kind)}"
        case inspect.FloatType():
            return f"a number{_bounds(kind)}"
        case inspect.StrType():
            return "text in quotes"
        case inspect.LiteralType():
            return f"one of {', '.join(map(_toml, kind.values))}"
        case inspect.VarTupleType():
            return f"a list of {_allowed(kind.item_type)}"
        case inspect.StructType() if (short := getattr(kind.cls, "short_form", None)) is not None:
            return f"a table, or its `{short}` alone"
        case _:
            return "a table"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    limits = (("from", kind.ge), ("above", kind.gt), ("to", kind.le), ("below", kind.lt))
    return "".join(f" {word} {limit:g}" for word, limit in limits if limit is not None)


def _example(known: inspect.Type, path: list[str]) -> str:
    """Return a value of the key to paste: from its annotation, else its default, else one of its type."""
    field = _field(_at(known, path[:-1]), path[-1])
    kind, default = field.type, field.default
    if isinstance(kind, inspect.Metadata) and (examples := (kind.extra_json_schema or {}).get("examples")):
        return _toml(examples[0])
    plain = [_bare(part) for part in _alternatives(kind)]
    if not isinstance(default, dict | msgspec.Struct) and default not in (None, (), msgspec.NODEFAULT):
        return _toml(default)
    return _example_of(plain[0])


def _example_of(kind: inspect.Type) -> str:
    match kind:
        case inspect.StructType():
            name = kind.fields[0].encode_name
            return f"{{{name} = {_example(kind, [name])}}}"
        case inspect.VarTupleType():
            return f"[{_example_of(_bare(_alternatives(kind.item_type)[0]))}]"
        case inspect.IntType() | inspect.FloatType():
            return "1"
        case inspect.StrType():
            return '"text"'
        case _:
            return "{}"


# -- types -----------------------------------------------------------------------------------------------------------


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    bare = _bare(kind)
    parts = bare.types if isinstance(bare, inspect.UnionType) else (bare,)
    return tuple(part for part in parts if not isinstance(part, inspect.NoneType))


def _structs(kind: inspect.Type) -> list[inspect.StructType]:
    """Return the Struct of a table, or of each table in a list of them; none for other values."""
    plain = [_bare(part) for part in _alternatives(kind)]
    items = [_bare(one.item_type) if isinstance(one, inspect.VarTupleType) else one for one in plain]
    return [one for one in items if isinstance(one, inspect.StructType)]


def _struct(kind: inspect.Type) -> inspect.StructType:
    return _structs(kind)[0]


def _at(kind: inspect.Type, path: list[str]) -> inspect.Type:
    for name in path:
        kind = _field(kind, name).type
    return kind


def _field(kind: inspect.Type, name: str) -> inspect.Field:
    return next(field for field in _struct(kind).fields if field.encode_name == name)


def _is_secret(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.Metadata) and bool((kind.extra or {}).get("secret"))


def _toml(value: Any) -> str:
    """Return the value in TOML, cut if it is long."""
    if isinstance(value, dict):
        text = f"{{{', '.join(f'{key} = {_toml(one)}' for key, one in value.items())}}}"
    elif isinstance(value, list):
        text = f"[{', '.join(map(_toml, value))}]"
    else:
        text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
