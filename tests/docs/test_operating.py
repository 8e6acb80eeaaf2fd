"""docs/operating.md tells of every metric and of every warning that there is."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.serve.daemon_process import DaemonProcess

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text()
LOGGED = {"warning", "error", "critical", "exception"}
ROW = re.compile(r"^- ((?:`[^`]+`(?:, )?)+): ", re.MULTILINE)


def rows() -> set[str]:
    """What the items of the page's lists begin with, several in an item apart."""
    return {name for cell in ROW.findall(PAGE) for name in cell.strip("`").split("`, `")}


@functools.cache
def log_lines() -> frozenset[str]:
    """The format of every line that is logged as a warning or worse."""
    return frozenset(_log_lines())


def _log_lines() -> Iterator[str]:
    for path in sorted((ROOT / "melld").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in LOGGED and ast.unparse(node.func.value) in ("log", "logger"):
                assert isinstance(node.args[0], ast.Constant), f"{path}: a log line's format is a constant"
                yield node.args[0].value


def test_every_metric_is_told_of(daemon: DaemonProcess) -> None:
    """Who sees a curve finds out what it means, and what to do about it."""
    families = set(re.findall(r"^# TYPE (melld_\w+) \w+$", daemon.get("/metrics"), re.MULTILINE))
    shown = {name for name in families if not name.endswith("_created")}
    assert {row for row in rows() if row.startswith("melld_")} == shown


def test_every_warning_is_told_of() -> None:
    """Who reads a line in the journal finds out whether to get up for it."""
    assert log_lines() - rows() == set()


def test_no_line_is_told_of_that_is_never_written() -> None:
    """A page that describes another version misleads."""
    told = {row for row in rows() if not row.startswith("melld_")}
    assert told - log_lines() == set()
