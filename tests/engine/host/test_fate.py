"""Whether a worker ended by its own doing: real processes, real signals."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from melld.engine.host import fate as fates
from melld.engine.host.fate import Fate, end_in_words, is_stopped
from tests.patience import PATIENCE_S

WAITS = """
import signal, sys
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):  # nohup, or a shell's background, ignores some
    signal.signal(number, signal.SIG_DFL)
print("here", flush=True)
sys.stdin.read()
"""


def started() -> subprocess.Popen[bytes]:
    """Return a process that waits."""
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    return process


def ended_by(number: signal.Signals) -> int:
    """Return the exit code of a process that got this signal."""
    with started() as process:
        process.send_signal(number)
        try:
            return process.wait(PATIENCE_S)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signalled_process_was_ended_from_outside(number: signal.Signals) -> None:
    """An administrator, a script, a logout."""
    assert Fate().is_from_outside(ended_by(number))


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE])
def test_a_crash_is_its_own_doing(number: signal.Signals) -> None:
    """Whatever it was computing may have caused it."""
    assert not Fate().is_from_outside(ended_by(number))


def test_an_exit_is_its_own_doing() -> None:
    """With or without an error, or unknown: a request that kills workers must not hide behind that."""
    assert not Fate().is_from_outside(None)
    assert not Fate().is_from_outside(1)
    assert not Fate().is_from_outside(0)


def test_an_out_of_memory_kill_is_its_own_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's SIGKILL shows in a counter; without the counter, it may have been one."""
    fate = Fate()
    monkeypatch.setattr(fates, "memory_kills", lambda: 10**9)
    assert not fate.is_from_outside(-signal.SIGKILL)
    assert fate.is_from_outside(-signal.SIGTERM)
    assert "OOM killer" in fate.killer
    monkeypatch.setattr(fates, "memory_kills", lambda: None)
    assert not Fate().is_from_outside(-signal.SIGKILL)


def test_a_stopped_worker_is_not_blamed_for_its_silence() -> None:
    """melld kills silent workers, but first checks whether somebody had stopped them."""
    with started() as process:
        assert not is_stopped(process.pid)
        hung = Fate()
        hung.about_to_kill(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + PATIENCE_S
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


def test_a_process_s_name_does_not_make_it_look_stopped(tmp_path: Path) -> None:
    """Models name files, and files name processes: a name says nothing about the process."""
    program = tmp_path / "x) T (1"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        assert "x) T (1" in stat.read_text()
        assert not is_stopped(process.pid)
        process.kill()


CHATTER = (
    "W1122 16:24:41.794000 6491 torch/_library/triton.py:53] Triton not available, find_triton_kernels = []",
    "INFO 11-22 16:24:42 [importing.py:68] Triton not installed or not compatible",
    "site-packages/dispatcher.py:138: FutureWarning: `torch.distributed.reduce_op` is deprecated",
    "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 19.17it/s]",
)


@pytest.mark.parametrize(
    ("exit_code", "printed", "words"),
    [
        (-signal.SIGTERM, CHATTER, "ended by SIGTERM"),
        (-signal.SIGKILL, (*CHATTER, "ValueError: of another hour"), "ended by SIGKILL (from outside)"),
        (1, CHATTER, "exited with code 1"),
        (1, (*CHATTER, "no such device", CHATTER[0]), "exited with code 1: no such device"),
        (
            1,
            ("RuntimeError: CUDA error", "(see the docs)", *CHATTER),
            "exited with code 1: RuntimeError: CUDA error",
        ),
        (1, ("zmq.error.ZMQError: no", *CHATTER), "exited with code 1: zmq.error.ZMQError: no"),
        (-signal.SIGABRT, ("what():  CUDA error", "frame #0: c10"), "ended by SIGABRT: what():  CUDA error"),
        (-signal.SIGSEGV, CHATTER, "ended by SIGSEGV"),
        (-(signal.SIGRTMIN + 6), CHATTER, f"ended by signal {signal.SIGRTMIN + 6}"),
        (None, (), "exited with an unknown code"),
    ],
)
def test_an_end_is_reported_with_its_own_reason(exit_code: int | None, printed: tuple[str, ...], words: str) -> None:
    """The log shows the cause, not a warning that happened to be printed before."""
    assert end_in_words(exit_code, "from outside", printed) == words
