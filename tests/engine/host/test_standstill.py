"""Real processes with and without progress: a slow load is never mistaken for a hung one."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from melld.engine.host.standstill import Onlooker, Standstill

LOOK_S, LOOKS = 0.3, 5
"""A tick of processor time, which is what is seen of it, takes 0.01 s."""
SLEEPS = "print(flush=True); __import__('time').sleep(600)"
COMPUTES = """
import time
print(flush=True)
while True:
    end_s = time.process_time() + 0.02
    while time.process_time() < end_s: pass
    time.sleep(0.1)
"""
READS = """
import os, time
source = os.open('/dev/zero', os.O_RDONLY)
print(flush=True)
while os.read(source, 1): time.sleep(0.1)
"""
A_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"


@contextmanager
def running(code: str) -> Iterator[int]:
    """Return a process that has started."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def looks(pid: int) -> tuple[int, int]:
    """Return what several looks see; the first has nothing to compare with."""
    onlooker, over = Onlooker(pid, "all"), threading.Event()
    onlooker.look()
    for _ in range(LOOKS):
        over.wait(LOOK_S)
        seen = onlooker.look()
    return seen.stopped_looks, seen.idle_looks


def test_a_process_that_waits_is_idle() -> None:
    """For a disk, a network or another process that never answers."""
    with running(SLEEPS) as pid:
        stopped, idle = looks(pid)
        assert stopped == 0
        assert idle >= LOOKS - 1  # it may not have waited yet as the first look came


def test_a_stopped_process_is_told_from_a_waiting_one() -> None:
    """It is given up sooner: nobody stops a process by chance."""
    with running(COMPUTES) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # it stops once it has the processor
        stopped, idle = looks(pid)
        assert stopped == LOOKS
        assert idle >= stopped  # on a busy machine it may not have computed before, either


def test_a_process_with_slow_progress_is_left_alone() -> None:
    """A large model on a slow disk loads as long as it takes: it, or a child, reads or computes."""
    for code in (COMPUTES, READS, A_CHILD.format(COMPUTES)):
        with running(code) as pid:
            stopped, idle = looks(pid)
            assert stopped == 0
            assert idle < LOOKS


def test_a_process_that_is_gone_is_not_idle() -> None:
    """Its end is reported by others."""
    with running(SLEEPS) as pid:
        pass
    assert looks(pid) == (0, 0)


BEARS = """
import subprocess, sys, threading
print(flush=True)
def bear():
    while True: subprocess.run(["/bin/true"])
for _ in range(3): threading.Thread(target=bear).start()
"""


def test_children_that_end_while_being_looked_at_do_no_harm() -> None:
    """A load runs compilers by the dozen: the daemon must not stumble over one that has just ended."""
    with running(BEARS) as pid:
        onlooker = Onlooker(pid, "all")
        end_s = time.process_time() + 0.25
        while time.process_time() < end_s:
            onlooker.look()


def test_a_process_that_ends_in_mid_look_does_no_harm() -> None:
    """Between two files of /proc any process may vanish, and its parent may not have reaped it yet."""
    for code in ("print(flush=True)", "import os; print(flush=True); os._exit(0)"):
        for _ in range(20):
            with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                onlooker = Onlooker(process.pid, "all")
                while process.poll() is None:
                    onlooker.look()
            assert onlooker.look() == Standstill()
