"""The decision log never gets in the way of serving, and keeps everything that it was given."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from melld.decisions.file import DecisionLogFile

HEADER = {"at": 0.0, "kind": "scheduler"}


class Said(list[str]):
    """Collects the warnings that the operator gets."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def __call__(self, what: str) -> None:
        self.append(what)
        self.came.set()


def begun(path: Path, header: dict[str, Any], said: Said) -> DecisionLogFile:
    log = DecisionLogFile(path, header, said)
    log.begin()
    return log


def take(log: DecisionLogFile, count: int) -> None:
    """Log that many events."""
    for number in range(count):
        log.take([{"at": float(number), "kind": "epoch"}])


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]


async def test_everything_accepted_is_in_the_closed_log(tmp_path: Path) -> None:
    """A daemon that stops leaves a complete log."""
    said = Said()
    log = begun(tmp_path / "log", HEADER, said)
    take(log, 1000)
    log.close()
    assert (kinds(tmp_path / "log"), said) == (["scheduler"] + ["epoch"] * 1000, [])


async def test_the_previous_daemon_s_log_is_kept(tmp_path: Path) -> None:
    """One file is one daemon's life, so that it can be audited; a restart does not lose the one before."""
    for count in (1, 2):
        log = begun(tmp_path / "log", HEADER, Said())
        take(log, count)
        log.close()
    assert (len(kinds(tmp_path / "log.1")), len(kinds(tmp_path / "log"))) == (2, 3)


async def test_a_log_that_never_begins_leaves_the_file_alone(tmp_path: Path) -> None:
    """A model that is not served after all may have the name of one that is; what it is given until then is kept."""
    kept, never, late = (DecisionLogFile(tmp_path / "log", HEADER, Said()) for _ in range(3))
    kept.begin()
    take(never, 1)
    never.close()
    take(late, 2)
    late.flush()
    take(kept, 3)
    kept.close()
    assert kinds(tmp_path / "log") == ["scheduler"] + ["epoch"] * 3
    assert not (tmp_path / "log.1").exists()
    late.begin()
    late.close()
    assert (len(kinds(tmp_path / "log.1")), len(kinds(tmp_path / "log"))) == (4, 3)


async def test_a_full_disk_is_reported_once() -> None:
    """Serving goes on, and the operator knows that the log does not."""
    said = Said()
    log = begun(Path("/dev/full"), HEADER, said)
    for _ in range(3):
        take(log, 10)
        log.flush()
    await asyncio.wait_for(said.came.wait(), 10)
    take(log, 10)
    log.flush()
    log.close()
    assert said == ["the decision log /dev/full ends here; serving continues: No space left on device"]


async def test_an_unwritable_directory_is_reported_once(tmp_path: Path) -> None:
    """A wrong path is no reason not to serve."""
    (tmp_path / "file").write_text("")
    said = Said()
    log = begun(tmp_path / "file" / "log", HEADER, said)
    take(log, 10)
    log.close()
    assert [("ends here" in what, "file" in what) for what in said] == [(True, True)]


async def test_a_hanging_disk_costs_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging network file system must not exhaust the daemon's memory."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr("melld.decisions.file.CLOSE_DEADLINE_S", 0.01)
    monkeypatch.setattr("melld.decisions.file.MOST_BEHIND", 5_000)
    said = Said()
    log = begun(fifo, HEADER, said)
    while not said:
        take(log, 1_000)
        log.flush()
    assert said == [f"the decision log {fifo} ends here; serving continues: the disk is too slow"]
    log.close()
    os.set_blocking(reader, True)
    while os.read(reader, 1 << 20):
        pass  # until the thread has written what it was given, and closes the file
    os.close(reader)
