"""Faults on demand are for tests: a worker that nobody wants to harm has none."""

import signal
from pathlib import Path

import pytest

from melld.engine.worker.faults import POINTS, FaultPoints


def test_without_a_directory_there_are_no_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that happen to have a fault's name harm nobody in production."""
    (tmp_path / "w0.frozen.KILL").touch()
    monkeypatch.chdir(tmp_path)
    for point in POINTS:
        FaultPoints(None, "w0").reach(point)
    assert (tmp_path / "w0.frozen.KILL").exists()


def test_a_fault_waits_for_its_worker_and_its_point_and_works_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history in which a worker dies at a named step is the same each time it is played."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: sent.append(number))
    (tmp_path / "w0.frozen.KILL").touch()
    FaultPoints(str(tmp_path), "w1").reach("frozen")
    points = FaultPoints(str(tmp_path), "w0")
    points.reach("attached")
    assert sent == []
    points.reach("frozen")
    points.reach("frozen")
    assert sent == [signal.SIGKILL]
