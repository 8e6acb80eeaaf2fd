"""Finds, by syntax, where melld reaches into the packages that it builds on.

Counted are, by module: assignments to their modules, classes and instances; their private names, used or imported;
subclasses of their classes, and which private methods those extend; `setattr`.  Not seen are changes by a method call
(`scheduler.running.remove`), which the contract tests of a seam hold.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MELLD = Path(__file__).parents[2] / "melld"
THEIRS = frozenset({"vllm", "torch", "aiohttp", "starlette", "transformers", "prometheus_client", "huggingface_hub"})
OVER_VLLM = ("engine.", "api.")
"""Rooms whose objects are vLLM's, whatever they import."""
NOT_PRIVATE = frozenset({"_exit", "_replace", "_get"})  # of `os`, of named tuples, of `asyncio.Queue`
OF_CTYPES = frozenset({"restype", "argtypes"})


def reaches() -> set[tuple[str, str]]:
    """Each module of melld with each name by which it reaches into another package."""
    found = set()
    for path in sorted(MELLD.rglob("*.py")):
        name = ".".join(path.relative_to(MELLD).with_suffix("").parts)
        if name.startswith(OVER_VLLM) or _names_of(_tree(path)):
            found |= {(name, reached) for reached in reached_by(path)}
    return found


def words_of(module: str) -> set[str]:
    """Return each identifier of a module, and each short string: a name may be handed to `setattr`."""
    found = set()
    for node in ast.walk(_tree(MELLD / f"{module.replace('.', '/')}.py")):
        for field in ("id", "attr", "name", "arg", "value"):
            word = getattr(node, field, None)
            found |= {word} if isinstance(word, str) else set()
    return found


def reached_by(path: Path) -> set[str]:
    """The names by which a module reaches into another package."""
    return set(_reached_by(path))


def _reached_by(path: Path) -> Iterator[str]:
    tree = _tree(path)
    theirs = _names_of(tree)
    own = {name for found in [path, *_imported(tree)] for name in _own_attributes(found)}
    for node in _nodes_of(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for one in (part for target in targets for part in getattr(target, "elts", [target])):
                is_assigned = isinstance(one, ast.Attribute) and not _is_self(one.value) and one.attr not in OF_CTYPES
                if is_assigned and (one.attr not in own or _root(one) in theirs):
                    yield one.attr
        elif isinstance(node, ast.Attribute):
            is_private = node.attr.startswith("_") and not node.attr.startswith("__") and not _is_self(node.value)
            if is_private and node.attr not in NOT_PRIVATE:
                yield node.attr
        elif isinstance(node, ast.ClassDef):
            if any(_root(base) in theirs or _is_argument(base) for base in node.bases):
                yield node.name
                yield from _of_base(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            yield node.func.id  # type: ignore[attr-defined]
        elif isinstance(node, ast.ImportFrom) and _package(node.module) in THEIRS:
            yield from (alias.name for alias in node.names if alias.name.startswith("_") and alias.name[1] != "_")


def _of_base(kind: ast.ClassDef) -> Iterator[str]:
    """The private attributes of `self` that are neither methods of the class nor set by it: its base's."""
    own = {node.name for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    slots = [node.value for node in kind.body if isinstance(node, ast.Assign) and _root(node.targets[0]) == "__slots__"]
    used = [node for node in ast.walk(kind) if isinstance(node, ast.Attribute) and _is_self(node.value)]
    if slots:
        own |= set(ast.literal_eval(slots[0]))
    else:
        own |= {node.attr for node in used if isinstance(node.ctx, ast.Store)}
    yield from (node.attr for node in used if node.attr.startswith("_") and node.attr not in own)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def _nodes_of(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


@cache
def _names_of(tree: ast.Module) -> frozenset[str]:
    """Return what the module has from the packages, by the names that it uses."""
    found = set()
    for node in _nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and _package(node.module) in THEIRS:
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {_package(alias.asname or alias.name) for alias in node.names if _package(alias.name) in THEIRS}
    return frozenset(found)


def _imported(tree: ast.Module) -> Iterator[Path]:
    """The modules of melld that this one imports."""
    for node in _nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and _package(node.module) == "melld":
            whole = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            files = (MELLD.parent / (name.replace(".", "/") + ".py") for name in whole if name)
            yield from (file for file in files if file.exists())


@cache
def _own_attributes(path: Path) -> frozenset[str]:
    """The attributes of the module's own classes that may be assigned."""
    found = set()
    for kind in (node for node in _nodes_of(_tree(path)) if isinstance(node, ast.ClassDef)):
        if not any(keyword.arg == "frozen" for keyword in kind.keywords):
            found |= {one.target.id for one in kind.body if isinstance(one, ast.AnnAssign)}  # type: ignore[union-attr]
        for node in ast.walk(kind):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
    return frozenset(found)


def _package(name: str | None) -> str:
    return (name or "").partition(".")[0]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_argument(node: ast.expr) -> bool:
    """A base class that is a value: `class InArena(executor)`."""
    return isinstance(node, ast.Name) and node.id[0].islower()


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
