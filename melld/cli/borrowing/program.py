"""The borrower's program: its environment, its signals, its end.

    terminal ──Ctrl-C, Ctrl-Z──► this process and the program, which are of one process group
    kill     ──any signal──────► this process ──► the program

Never speaks to the daemon.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from melld.control.messages import Loan

PR_SET_PDEATHSIG = 1
SI_KERNEL = 0x80
"""What sent the signal: the terminal, to the whole process group."""
PASSED_ON = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    | {signal.SIGTSTP, signal.SIGCONT}
)
WATCHED = PASSED_ON | {signal.SIGCHLD}


def environment_of(loan: Loan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the program's environment: its GPUs by UUID, as their numbers differ where some are hidden."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(loan.uuids)} if loan.uuids else {}
    return {**environment, "MELLD_DEVICES": ",".join(loan.devices), **visible}


def run_program(command: Sequence[str], environment: Mapping[str, str], on_begun: Callable[[], None]) -> int:
    """Run the program to its end and return its exit code, which is 128+n after signal n.

    Raises:
        OSError: it cannot be run.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        begin = functools.partial(_become_program, ctypes.CDLL(None), os.getpid(), before)
        child = subprocess.Popen(command, env=environment, close_fds=False, preexec_fn=begin)  # noqa: PLW1509, S603
        on_begun()
        return _until_ended(child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_program(libc: ctypes.CDLL, parent: int, mask: set[int | signal.Signals]) -> None:
    """Die together with the parent, which holds the loan: killing it returns the device.  Runs in the child."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _until_ended(child: subprocess.Popen[bytes]) -> int:
    """Pass signals on until the program has ended; stop when it stops, so that the shell has the terminal again."""
    while True:
        came = signal.sigwaitinfo(WATCHED)
        if came.si_signo != signal.SIGCHLD:
            if came.si_code != SI_KERNEL:  # else the program got it from the terminal, too
                with contextlib.suppress(PermissionError):  # `sudo` runs as another user
                    os.kill(child.pid, came.si_signo)
            continue
        pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            if os.WSTOPSIG(status) != signal.SIGSTOP:  # else somebody has stopped the program alone
                os.kill(os.getpid(), signal.SIGSTOP)
        elif pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode if child.returncode >= 0 else 128 - child.returncode
