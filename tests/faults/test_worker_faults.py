"""Faults on demand belong to the tests alone: their triggers work as the tests assume."""

import signal
from pathlib import Path

import pytest

from tests.worker_faults import FaultPoints

ROOT = Path(__file__).parents[2]


def test_the_product_contains_no_fault_injection() -> None:
    """An environment variable of a production worker ends nobody's requests."""
    assert [path for path in (ROOT / "melld").rglob("*.py") if "MELLD_FAULTS" in path.read_text()] == []


def test_a_fault_strikes_once_at_its_worker_and_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history in which a worker dies at a named step is reproducible."""
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
