"""The options of `vllm serve` as flags: `--max-model-len 16k` sets `[model.vllm] max_model_len`.

Owns the parsing of their values.  Never validates them: `melld.engine.arguments` and vLLM itself do.
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from typing import Any

from melld.engine.vllm_options import option_kinds

PREFIX = "model.vllm."
TRANSLATED = frozenset({"model", "served_model_name", "host", "port", "api_key", "log_level"})
"""Options for which melld has flags of its own."""
OF_SERVER = frozenset({"allow_credentials", "allowed_origins", "allowed_methods", "allowed_headers"})
"""Options that are keys of `[server]`."""
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add every option of `vllm serve`, without listing them in the help."""
    for name, annotation in option_kinds().items():
        if name in TRANSLATED:
            continue
        words = [f"--{name.replace('_', '-')}", f"--{name}", *([SHORT[name]] if name in SHORT else [])]
        table = "server." if name in OF_SERVER else PREFIX
        common: dict[str, Any] = {
            "dest": table + name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS
        }  # fmt: skip
        parts = {part.strip() for part in annotation.strip("'").split("|")}
        if parts <= {"bool", "None"}:
            parser.add_argument(*dict.fromkeys(words), action=argparse.BooleanOptionalAction, **common)
        elif any(part.startswith(("list[", "set[")) for part in parts):
            parser.add_argument(*dict.fromkeys(words), nargs="+", action=_Values, type=_reader(annotation), **common)
        elif "bool" in parts:
            parser.add_argument(*dict.fromkeys(words), nargs="?", const=True, type=_reader(annotation), **common)
        else:
            parser.add_argument(*dict.fromkeys(words), type=_reader(annotation), **common)


def vllm_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values that these flags set, by dotted key."""
    return {key: value for key, value in vars(arguments).items() if key.startswith((PREFIX, "server."))}


class _Values(argparse.Action):
    """A value of several words, or one JSON list."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: Any = None
    ) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 and isinstance(values[0], list) else list(values))


def _reader(annotation: str) -> Callable[[str], Any]:
    kinds = set(re.findall(r"\w+", annotation)) - {"None", "list", "set"}

    def read(text: str) -> Any:
        if text[:1] in ("{", "["):
            return _json(text)
        if "str" in kinds:
            return text
        number = _number(text)
        if number is None and kinds <= {"int", "float"} and text != "auto":
            wanted = "a number, such as 0.9" if "float" in kinds else "a whole number, such as 16384 or 16k"
            raise argparse.ArgumentTypeError(f"wants {wanted}, not {text!r}")
        return text if number is None else number

    return read


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None


def _number(text: str) -> int | float | None:
    """Parse 16384, 0.9, .9, 1e-3, or vLLM's 16k (decimal) and 16K (binary); return None for anything else."""
    if (found := re.fullmatch(r"(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)([kmgKMG]?)", text)) is None:
        return None
    value = float(found[1]) * UNITS[found[2]]
    if math.isinf(value):
        return None
    return int(value) if found[1].lstrip("-").isdecimal() or found[2] else value
