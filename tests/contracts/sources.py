"""Facts read from a package's sources, which need not be importable on this machine."""

import ast
import functools
import importlib.util
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Fact(NamedTuple):
    """An assumption of melld's, and the words of the source that make it true."""

    what: str
    file: str
    """Within the package, after its name."""
    where: str
    """A function, `Class.method` or class; empty: the whole file."""
    words: str
    """In this order, whatever lies between the parts that `...` separates, however it is broken into lines."""

    def __str__(self) -> str:
        return self.what

    def source(self) -> str:
        """Return the text that should contain the words."""
        text = installed(self.file).read_text()
        return part_of(text, self.where) if self.where else text

    def holds_in(self, source: str) -> bool:
        """Return True if the text contains the words."""
        return re.search(self._pattern(), source, re.DOTALL) is not None

    def otherwise(self) -> str:
        """Return a copy of the source whose last word is changed wherever it follows the others."""
        *before, last = self._words()
        changed = re.compile(self._join([*before, f"(?P<last>{last})"]), re.DOTALL)
        source = self.source()
        while (found := changed.search(source)) is not None:
            source = source[: found.start("last")] + "@" + source[found.end("last") :]
        return source

    def _pattern(self) -> str:
        return self._join(self._words())

    def _words(self) -> list[str]:
        return ["..." if word == "..." else re.escape(word) for word in re.findall(r"\.\.\.|\w+|[^\w\s]", self.words)]

    @staticmethod
    def _join(words: list[str]) -> str:
        return r"\s*".join(".*?" if word == "..." else word for word in words)


def installed(file: str) -> Path:
    """Return the path of an installed package's file."""
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0]) / rest


@functools.cache
def tree_of(text: str) -> ast.Module:
    """Parse a file, once: most facts are in a few files."""
    return ast.parse(text)


@functools.cache
def definitions_in(node: ast.AST) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Return definitions by name; of several the outermost, and of those the first."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {one.name: one for one in reversed(list(_statements_in(node))) if isinstance(one, kinds)}


def _statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Walk as `ast.walk` does, but not into expressions, which are most of a file and define nothing."""
    found = deque([node])
    while found:
        yield (one := found.popleft())
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            found.extend(getattr(one, block, ()))


@functools.cache
def part_of(text: str, where: str) -> str:
    """Return the source of a function or class; `Class.method` is one of that class."""
    node: ast.AST = tree_of(text)
    for name in where.split("."):
        assert name in definitions_in(node), f"there is no {where}"
        node = definitions_in(node)[name]
    return _segment(_lines_of(text), node)


@functools.cache
def _lines_of(text: str) -> list[str]:
    return text.split("\n")


def _segment(lines: list[str], node: ast.AST) -> str:
    """Return what `ast.get_source_segment` does, which splits the text into its lines anew each time, by character."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    assert node.end_lineno is not None
    *whole, last = (line.encode() for line in lines[node.lineno - 1 : node.end_lineno])
    return b"\n".join([*whole, last[: node.end_col_offset]])[node.col_offset :].decode()
