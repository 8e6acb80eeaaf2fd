"""What kind of value each option of `vllm serve` takes.

Read from vLLM's source and not imported, which would take seconds.
"""

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path

SOURCES = (
    ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")),
    ("entrypoints/launchers/cli_args.py", ("BaseFrontendArgs", "FrontendArgs")),
)


def option_kinds() -> Mapping[str, str]:
    """The annotation of each option, such as `int | None`, by the option's name; empty where there is no vLLM."""
    if (found := importlib.util.find_spec("vllm")) is None or found.origin is None:
        return {}
    kinds: dict[str, str] = {}
    for file, names in SOURCES:
        module = ast.parse((Path(found.origin).parent / file).read_bytes())
        for kind in module.body:
            if isinstance(kind, ast.ClassDef) and kind.name in names:
                fields = (line for line in kind.body if isinstance(line, ast.AnnAssign))
                kinds |= {f.target.id: ast.unparse(f.annotation) for f in fields if isinstance(f.target, ast.Name)}
    return {name: annotation for name, annotation in kinds.items() if not name.startswith("_")}
