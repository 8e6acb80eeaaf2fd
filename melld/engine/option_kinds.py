"""The type of each option of `vllm serve`.

Reads vLLM's source, as an import would take seconds.
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path

Source = tuple[str, tuple[str, ...]]
"""A file of vLLM, and the classes of options in it."""
ENGINE_SOURCE: Source = ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))
FRONTEND_SOURCE: Source = ("entrypoints/launchers/cli_args.py", ("BaseFrontendArgs", "FrontendArgs"))


@functools.cache
def option_kinds(sources: tuple[Source, ...] = (ENGINE_SOURCE, FRONTEND_SOURCE)) -> Mapping[str, str]:
    """Return the annotation of each option, such as `int | None`, by name; empty if vLLM is not installed."""
    if (found := importlib.util.find_spec("vllm")) is None or found.origin is None:
        return {}
    kinds: dict[str, str] = {}
    for file, names in sources:
        module = ast.parse((Path(found.origin).parent / file).read_bytes())
        for kind in module.body:
            if isinstance(kind, ast.ClassDef) and kind.name in names:
                fields = (line for line in kind.body if isinstance(line, ast.AnnAssign))
                kinds |= {f.target.id: ast.unparse(f.annotation) for f in fields if isinstance(f.target, ast.Name)}
    return {name: annotation for name, annotation in kinds.items() if not name.startswith("_")}
