"""docs/benchmarks.md shows the tables that benchmarks/results holds."""

import re
import shlex

import pytest

from benchmarks.harness import PAGE, PLACE, RESULTS, ROOT, load, page_text

NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))


def test_the_page_matches_the_results() -> None:
    """A figure is changed in one place: each `make bench` writes the page."""
    assert len(PLACE.findall(PAGE.read_text())) > 4
    assert page_text(PAGE.read_text()) == PAGE.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_every_table_is_well_formed_and_names_its_command(name: str) -> None:
    """Rows are as wide as the header, and the command's script exists."""
    table = load(name)
    python, flag, script, *_ = shlex.split(table["command"])
    assert (python, flag) == ("python", "-m")
    assert (ROOT / f"{script.replace('.', '/')}.py").is_file()
    assert table["date"].startswith("20")
    assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_every_result_that_the_page_names_exists() -> None:
    """A reader who wants all rows finds them."""
    for name in re.findall(r"`([\w*-]+)\.json`", PAGE.read_text()):
        assert list(RESULTS.glob(f"{name}.json")), name
