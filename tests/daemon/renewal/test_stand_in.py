"""The process that stays in the first daemon's place, for whoever waits for it."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

DAEMON = """
import os, subprocess, sys
if sys.argv[2:]:  # renewed twice: the second is this one's child until it ends
    subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
    while b"stand_in.py" not in open(f"/proc/{os.getppid()}/cmdline", "rb").read():
        pass
    os._exit(0)
import signal
signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGTERM])
print("serves", flush=True)
signal.sigwait([signal.SIGTERM])
os._exit(int(sys.argv[1]))
"""
FIRST = """
import signal, subprocess, sys
from melld.daemon.renewal.stand_in import become_stand_in
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as the daemon it would act on one
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], *sys.argv[3:]])
become_stand_in()
"""


def stood_in(*words: str) -> subprocess.Popen[str]:
    started = subprocess.Popen([sys.executable, "-c", FIRST, DAEMON, *words], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "serves\n"
    return started


def test_a_signal_reaches_the_daemon_and_its_exit_code_comes_back() -> None:
    """`docker stop` stops what serves, and a supervisor sees whether it failed."""
    for words in (("7",), ("7", DAEMON)):
        with stood_in(*words) as waits:
            waits.terminate()
            assert waits.wait(PATIENCE_S) == 7


def test_a_daemon_that_is_killed_ends_it() -> None:
    """The supervisor then starts another."""
    with stood_in("0") as waits:
        [child] = Path(f"/proc/{waits.pid}/task/{waits.pid}/children").read_text().split()
        subprocess.run(["kill", "-KILL", child], check=True)
        assert waits.wait(PATIENCE_S) == 128 + signal.SIGKILL
