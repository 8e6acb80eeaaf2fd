"""A small process that stands in for the first daemon where no service manager can be told of the next one.

It gives a terminal, a container or a supervisor one process to watch for as long as any daemon serves: it forwards
signals and ends with the last daemon's exit code.  Runs on its own, with only the standard library.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PASSED_ON = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
SI_KERNEL = 0x80
"""The signal came from the terminal, which sent it to the daemon as well."""


def main() -> int:
    """Wait for all children and return the last exit code.  A daemon's successor becomes a child as well."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    code = 0
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        came = signal.sigtimedwait(PASSED_ON | {signal.SIGCHLD}, 1.0)  # a child may have ended earlier
        if came is not None and came.si_signo in PASSED_ON and came.si_code != SI_KERNEL:
            for child in children:
                os.kill(int(child), came.si_signo)
        with contextlib.suppress(ChildProcessError):  # none is left
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code


def become_stand_in() -> None:
    """Replace this process, which has served, with its stand-in.  Signals that arrive in between stay pending."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # survives execv, so that no daemon is orphaned meanwhile
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__])  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
