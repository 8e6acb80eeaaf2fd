"""Faults on demand are the tests' own: what sets them works as the tests that use it believe."""

import signal
from pathlib import Path

import pytest

from tests.worker_faults import FaultPoints

ROOT = Path(__file__).parents[2]


def test_the_product_holds_no_way_to_harm_it() -> None:
    """A variable in the environment of a worker in production ends nobody's requests."""
    assert [path for path in (ROOT / "melld").rglob("*.py") if "MELLD_FAULTS" in path.read_text()] == []


def test_a_fault_waits_for_its_worker_and_its_point_and_works_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history in which a worker dies at a named step is the same each time it is played."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: sent.append(number))
    (tmp_path / "w0.frozen.KILL").touch()
    FaultPoints(tmp_path, "w1").reach("frozen")
    points = FaultPoints(tmp_path, "w0")
    points.reach("attached")
    assert sent == []
    points.reach("frozen")
    points.reach("frozen")
    assert sent == [signal.SIGKILL]
