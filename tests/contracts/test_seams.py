"""All seams are in one list: what reaches into another package, what it holds on to there, and what tests it."""

import ast
import functools
from pathlib import Path

import pytest

from tests.contracts import reaching
from tests.contracts.places import changed, places
from tests.contracts.seams import SEAMS, Seam
from tests.docs.seams_text import PAGE, seams_text

TESTS = Path(__file__).parents[1]
KINDS = {"subclass", "class", "replaced", "private", "state", "copied"}
OURS = {("daemon.wiring", "division"), ("daemon.renewal.new", "loan"), ("migrate.transports.nixl", "environ")}
OURS |= {("engine.host.template", name) for name in ("_children", "_forkserver", "_forkserver_pid")}
OURS |= {
    (module, name)
    for module in ("engine.host.template", "engine.worker.forking")
    for name in ("_fd", "_resource_tracker")
}
"""Attributes of objects of ours and of Python's, whose `multiprocessing` tells neither its fork server's pid nor how to
do without a resource tracker."""


def declared() -> set[tuple[str, str]]:
    return {(module, name) for seam in SEAMS for module, names in seam.ours.items() for name in names}


def test_every_reach_into_another_package_is_declared() -> None:
    """Else raising a pin would be a search, and not a list."""
    assert sorted(reaching.reaches() - declared() - OURS) == []


def test_every_declared_reach_still_exists() -> None:
    """A seam that has gone leaves the list."""
    assert sorted((module, name) for module, name in declared() if name not in reaching.words_of(module)) == []


def test_an_undeclared_reach_is_noticed(tmp_path: Path) -> None:
    """The test above can fail: here is each way to reach in."""
    file = tmp_path / "engine.py"
    file.write_text(
        "from vllm import _private, config\n"
        "from vllm.v1 import Base\n"
        "config.limit = 1\n"
        "class Ours(Base):\n"
        "    def method(self, scheduler):\n"
        "        scheduler._hidden()\n"
        "        setattr(scheduler, 'a', 1)\n"
        "        return self._of_base\n"
    )
    assert reaching.reached_by(file) == {"_private", "limit", "Ours", "_hidden", "setattr", "_of_base"}


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.what)
def test_every_seam_s_places_are_as_last_reviewed(seam: Seam) -> None:
    """An upgrade names each changed place: review it, then run `python -m tests.contracts.places`."""
    assert changed(seam.what) == {}


def test_each_seam_has_a_kind_and_places() -> None:
    """A row without a place in another package could not be checked at an upgrade."""
    assert {seam.how for seam in SEAMS} <= KINDS
    assert [seam.what for seam in SEAMS] == list(places())
    assert all(places().values())


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.what)
def test_every_seam_names_an_existing_test(seam: Seam) -> None:
    """Whoever changes a seam knows what to run."""
    file, _, name = seam.test.partition("::")
    assert name in _functions(TESTS / file)


@functools.cache
def _functions(file: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds)}


def test_the_page_contains_the_list() -> None:
    """`python -m tests.docs.seams_text` writes it."""
    assert seams_text() in PAGE.read_text()
