"""docs/faults.md names existing tests and leaves no fault out."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
ROW = re.compile(r"^- \*\*(\d+)\*\* ", re.MULTILINE)
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::[\w:]+)?)`", PAGE)))


@cache
def named_in(path: Path) -> frozenset[str]:
    """Return a file's tests, as pytest names them."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + one.name for one in inner if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(found)


def test_every_fault_has_a_row_with_a_test() -> None:
    """A promise without a test is a hope."""
    assert [int(number) for number in ROW.findall(PAGE)] == list(range(1, 33))
    rows = [line for line in PAGE.splitlines() if line.startswith("- **")]
    assert [row for row in rows if "::test_" not in row] == []


@pytest.mark.parametrize("name", NAMED)
def test_every_named_test_exists(name: str) -> None:
    """A test that is renamed or removed must not leave its row behind."""
    path, _, test = name.partition("::")
    assert not test or test in named_in(ROOT / path)
    assert (ROOT / path).is_file()
