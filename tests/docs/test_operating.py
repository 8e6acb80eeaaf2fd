"""docs/operating.md documents every metric and every warning."""

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
    """Return what the items of the page's lists begin with, splitting items that name several."""
    return {name for cell in ROW.findall(PAGE) for name in cell.strip("`").split("`, `")}


@functools.cache
def log_lines() -> frozenset[str]:
    """Return the format of every line logged as a warning or worse."""
    return frozenset(_log_lines())


def _log_lines() -> Iterator[str]:
    for path in sorted((ROOT / "melld").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in LOGGED and ast.unparse(node.func.value) in ("log", "logger"):
                assert isinstance(node.args[0], ast.Constant), f"{path}: a log line's format is a constant"
                yield node.args[0].value


def test_every_metric_is_documented(daemon: DaemonProcess) -> None:
    """Whoever sees a curve finds out what it means, and what to do about it."""
    families = set(re.findall(r"^# TYPE (melld_\w+) \w+$", daemon.get("/metrics"), re.MULTILINE))
    shown = {name for name in families if not name.endswith("_created")}
    assert {row for row in rows() if row.startswith("melld_")} == shown


def test_every_warning_is_documented() -> None:
    """Whoever reads a line in the journal finds out whether to get up for it."""
    assert log_lines() - rows() == set()


def test_no_documented_warning_is_obsolete() -> None:
    """A page that describes another version misleads."""
    told = {row for row in rows() if not row.startswith("melld_")}
    assert told - log_lines() == set()
