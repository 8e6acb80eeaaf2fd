"""One process of this machine, from the moment it is asked for to its end.

Owns the descriptor that becomes readable at the end.  `template` has it forked.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

REAPED_S = 0.2
"""Cap on the wait for the exit code of a process that the template has reaped and is about to tell of."""
UNKNOWN = 255
"""The exit code that `multiprocessing` reports for the child of a fork server that is gone."""


class LocalProcess:
    """A process to have forked.

    Calls `on_forked(pid)`, then `on_exited(exit_code, cause)`; `cause` says why it was never forked.  An unknown exit
    code is None.
    """

    def __init__(self, on_forked: Callable[[int], None], on_exited: Callable[[int | None, str], None]) -> None:
        self.pid = 0
        """0 until it is forked."""
        self._on_forked = on_forked
        self._on_exited = on_exited
        self._child: BaseProcess | None = None
        """Kept while it runs: the kernel kills the process once nobody holds its pipe (`worker.forking`)."""
        self._end = -1
        self._is_over = False

    def kill(self) -> None:
        """Kill the process; one not forked yet counts as ended and is killed when it appears."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(self._end, signal.SIGKILL)
        elif not self._is_over:
            self._is_over = True
            asyncio.get_running_loop().call_soon(self._on_exited, -signal.SIGKILL, "")

    def not_forked(self, exit_code: int | None, cause: str) -> None:
        """Note that the process will never exist; `exit_code`: of the template."""
        if not self._is_over:
            self._is_over = True
            self._on_exited(exit_code, cause)

    def forked(self, child: BaseProcess) -> None:
        """Note that the process exists.

        Raises:
            OSError: there are no descriptors; the process is killed.
        """
        assert child.pid is not None
        if self._is_over:
            child.kill()
            return
        try:
            self._end = os.pidfd_open(child.pid)
        except ProcessLookupError:  # it has ended already
            asyncio.get_running_loop().call_soon(self._exited, child)
        except OSError:
            child.kill()
            raise
        else:
            self._child = child
            asyncio.get_running_loop().add_reader(self._end, self._ended)
        self.pid = child.pid
        self._on_forked(child.pid)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        os.close(self._end)
        child, self._child = self._child, None
        assert child is not None
        self._exited(child)

    def _exited(self, child: BaseProcess) -> None:
        self._is_over = True
        exit_code = _exit_code_of_zombie(self.pid)
        if exit_code is None:
            child.join(REAPED_S)
            exit_code = None if child.exitcode == UNKNOWN else child.exitcode
        self._on_exited(exit_code, "")


def _exit_code_of_zombie(pid: int) -> int | None:
    """Return the exit code of an ended process that its parent, possibly stopped, has not reaped."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[48])) if state == "Z" else None
