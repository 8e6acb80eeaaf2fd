"""Whether a worker ended of its own doing: real processes, real signals."""

import signal
import subprocess
import sys
import time

import pytest

from melld.engine import process_fate
from melld.engine.process_fate import Fate, is_stopped

WAITS = """
import signal, sys
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):  # nohup, or a shell's background, ignores some
    signal.signal(number, signal.SIG_DFL)
print("here", flush=True)
sys.stdin.read()
"""


def started() -> subprocess.Popen[bytes]:
    """A process that waits."""
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    return process


def ended_by(number: signal.Signals) -> int:
    """The exit code of one that was sent this signal."""
    with started() as process:
        process.send_signal(number)
        try:
            return process.wait(30)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_who_is_sent_a_signal_is_ended_from_outside(number: signal.Signals) -> None:
    """An administrator, a script, a logout."""
    assert Fate().is_from_outside(ended_by(number))


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE])
def test_a_crash_is_its_own_doing(number: signal.Signals) -> None:
    """Whatever it was computing may have caused it."""
    assert not Fate().is_from_outside(ended_by(number))


def test_an_exit_is_its_own_doing() -> None:
    """With an error, or without one."""
    assert not Fate().is_from_outside(1)
    assert not Fate().is_from_outside(0)


def test_want_of_memory_is_its_own_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills with SIGKILL, too, and counts it; where it does not tell its count, it may have been it."""
    fate = Fate()
    monkeypatch.setattr(process_fate, "memory_kills", lambda: 10**9)
    assert not fate.is_from_outside(-signal.SIGKILL)
    assert not fate.is_from_outside(None)
    assert fate.is_from_outside(-signal.SIGTERM)
    assert "want of memory" in fate.killer
    monkeypatch.setattr(process_fate, "memory_kills", lambda: None)
    assert not Fate().is_from_outside(-signal.SIGKILL)


def test_one_that_was_stopped_was_silent_for_that() -> None:
    """melld kills who is silent; whether it hung or somebody had stopped it is seen before."""
    with started() as process:
        assert not is_stopped(process.pid)
        hung = Fate()
        hung.about_to_kill(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + 30
        while not is_stopped(process.pid):
            assert time.monotonic() < deadline_s
        stopped = Fate()
        stopped.about_to_kill(process.pid)
        process.kill()
        code = process.wait()
    stopped.about_to_kill(process.pid)
    assert not hung.is_from_outside(code)
    assert stopped.is_from_outside(code)
    assert stopped.killer == "by melld"
    assert not is_stopped(process.pid)
