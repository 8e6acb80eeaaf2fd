"""Blocks that arrive corrupted, on real workers: with checksums no answer is ever computed from them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.migrate.live import CASES, Bench, Stream
from tests.serve.daemon_process import DaemonProcess
from tests.worker_faults import DAMAGES, PULLED

pytestmark = pytest.mark.long  # its short forms: a wrong byte in `transports`, a failed copy in `test_migration`


@pytest.fixture(autouse=True)
def _left_as_it_was(checked: Bench) -> Iterator[None]:
    yield
    checked.operator.wait_idle()


@pytest.fixture(scope="module")
def checked(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two workers that check what they copy, over rate-limited links, one move at a time."""
    faults = tmp_path_factory.mktemp("faults")
    flags = ["--device", "cpu:2", "--kv-bytes", "64MiB", "--set", 'scheduler.policy="most-free"']
    flags += ["--set", "migration.checksum=true", "--set", "migration.max_moves_per_link=1"]
    flags += ["--set", "idle.sleep_after_s=inf", "--set", 'migration.link_bytes_per_s="64MiB"']
    with DaemonProcess(demo_model, *flags, environment={"MELLD_FAULTS": str(faults)}) as daemon:
        bench = Bench(daemon.wait_ready(), faults)
        bench.operator.wait_linked(daemon)
        yield bench


@pytest.mark.parametrize("damage", DAMAGES)
def test_corruption_before_the_freeze_is_found_and_the_source_goes_on(checked: Bench, damage: str) -> None:
    """A flipped or missing block: the move fails, the answer does not show it, the next move works."""
    with checked.slowed():
        stream = Stream(checked.daemon, CASES["long"] | {"cache_salt": damage})  # its blocks are not there already
        stream.wait_chunks(12)
        report = damaged_move(checked, stream, damage)
        assert "frozen" not in " ".join(report["story"])
        [again] = checked.operator.move(stream, "kv")
        assert again["outcome"] == "committed"
    assert stream.result() == checked.unmoved("long")
    assert 'outcome="copy failed",via="kv"' in checked.daemon.get("/metrics")


@pytest.mark.parametrize("damage", DAMAGES)
def test_corruption_after_the_freeze_is_found_and_the_source_goes_on(checked: Bench, damage: str) -> None:
    """The same in the last copy, when the request is frozen: it is thawed."""
    body = {"prompt": [9, 8, 7], "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    unmoved = Stream(checked.daemon, body).result()
    for _ in range(10):  # one that has filled a block before it is looked at is copied beside decoding, too
        with checked.slowed():
            stream = Stream(checked.daemon, body)
            stream.wait_chunks(1)
            report = damaged_move(checked, stream, damage)
        assert stream.result() == unmoved
        if "frozen" in " ".join(report["story"]):
            break
    else:
        raise AssertionError("no move had its last copy damaged")


def damaged_move(bench: Bench, stream: Stream, damage: str) -> Any:
    """Make a move whose next copy arrives damaged; return its report."""
    [one] = bench.operator.requests_of(stream)
    there = "w1" if one["worker"] == "w0" else "w0"
    fault = bench.faults / f"{there}.{PULLED}.{damage}"
    fault.touch()
    report = bench.operator.migrate(one["request"], there, "kv")
    assert not fault.exists(), "the fault was never met"
    assert (report["outcome"], report["gap_s"]) == ("copy failed", None)
    assert "arrived corrupted" in report["reason"]
    [still] = bench.operator.requests_of(stream)
    assert still["worker"] == one["worker"]
    return report
