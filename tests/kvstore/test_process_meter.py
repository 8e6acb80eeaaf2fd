"""A CPU worker's memory and load, from the system's own counters."""

import os
import subprocess
import sys

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
    """A busy worker shows as busy; the first reading has nothing to compare and claims nothing."""
    meter = ProcessMeter(os.getpid())
    assert meter.read().utilisation is None
    ticks_needed = os.times().user + 0.2
    while os.times().user < ticks_needed:
        sum(range(1000))
    busy = meter.read().utilisation
    assert busy is not None
    assert 0 < busy <= 1


def test_an_ended_process_is_lost_even_before_it_is_reaped() -> None:
    """A dead worker is never shown with its last memory use."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meter = ProcessMeter(child.pid)
    assert meter.read().state is DeviceState.OK
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (meter.read().state, meter.read().reason) == (DeviceState.LOST, "process: has ended")
    child.communicate()
    assert (meter.read().state, meter.read().reason) == (DeviceState.LOST, "process: has ended")


def test_a_child_that_ends_during_a_reading_is_no_lost_worker() -> None:
    """A worker may run a compiler: its end is not the worker's."""
    code = "import subprocess; print(flush=True)\nwhile True: subprocess.run(['/bin/true'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        meter = ProcessMeter(worker.pid)
        states = {meter.read().state for _ in range(500)}
        worker.kill()
    assert states == {DeviceState.OK}


def test_memory_of_a_worker_s_ranks_counts_as_its_own() -> None:
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
