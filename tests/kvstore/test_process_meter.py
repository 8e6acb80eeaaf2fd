"""A CPU worker's memory and load, from the system's own counters."""

import os
import subprocess
import sys
from pathlib import Path

from melld.kvstore.device_reading import DeviceState
from melld.kvstore.process_meter import ProcessMeter, with_children


def test_memory_follows_what_the_process_takes() -> None:
    """`melld status` shows a CPU worker's real memory."""
    meter = ProcessMeter(os.getpid())
    before = meter.read()
    ballast = bytearray(os.urandom(1 << 20) * 64)
    after = meter.read()
    assert (before.state, before.power_w) == (DeviceState.OK, None)
    assert before.used_bytes is not None
    assert after.used_bytes is not None
    assert after.used_bytes - before.used_bytes > len(ballast) * 0.8


def test_utilisation_is_the_share_of_a_core_since_the_last_reading() -> None:
    """A busy worker shows as busy; the first reading, with nothing to compare, claims nothing."""
    meter = ProcessMeter(os.getpid())
    assert meter.read().utilisation is None
    ticks_needed = os.times().user + 0.2
    while os.times().user < ticks_needed:
        sum(range(1000))
    busy = meter.read().utilisation
    assert busy is not None
    assert 0 < busy <= 1


def test_a_process_that_has_ended_is_lost_even_before_it_is_reaped() -> None:
    """A dead worker is never shown with the memory of its last moment."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meter = ProcessMeter(child.pid)
    assert meter.read().state is DeviceState.OK
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (meter.read().state, meter.read().reason) == (DeviceState.LOST, "process: has ended")
    child.communicate()
    assert meter.read().reason == "process: No such file or directory"


def test_a_name_with_brackets_and_spaces_does_not_confuse_it(tmp_path: Path) -> None:
    """A process may call itself anything: `stat` puts the name, unescaped, in front of the numbers."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text("9 5 1 1 0 1 0\n")
    times = " ".join(["0"] * 10 + ["150", "50"] + ["0"] * 30)
    (tmp_path / "7" / "stat").write_text(f"7 (evil ) Z 1) S {times}\n")
    reading = ProcessMeter(7, tmp_path).read()
    assert reading.state is DeviceState.OK
    assert reading.used_bytes == 5 * os.sysconf("SC_PAGE_SIZE")


def test_a_child_that_ends_as_it_is_looked_at_is_no_lost_worker(tmp_path: Path) -> None:
    """A worker may run a compiler: the moment when that has ended is not one without the worker."""
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    (tmp_path / "7" / "task" / "7" / "children").write_text("8 ")
    (tmp_path / "7" / "statm").write_text("9 5 1 1 0 1 0\n")
    (tmp_path / "7" / "stat").write_text(f"7 (worker) S {' '.join(['0'] * 40)}\n")
    assert ProcessMeter(7, tmp_path).read().state is DeviceState.OK


def test_what_a_workers_ranks_take_counts_as_its_own() -> None:
    """A worker with several devices only schedules: its ranks hold the weights."""
    rank = "ballast = bytes(range(256)) * (1 << 18); print(flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"\n"
        pids = with_children(worker.pid)
        assert (pids[0], len(pids)) == (worker.pid, 2)
        used = ProcessMeter(worker.pid).read().used_bytes
        assert used is not None
        assert used > 1 << 26
        worker.communicate(b"\n")
