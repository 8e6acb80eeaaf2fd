"""Tells a worker's own failure from an end that came from outside, for which no request is to blame.

What cannot be known counts as the worker's own failure.

    a signal that no process sends itself (SIGTERM, SIGHUP, SIGQUIT)      from outside
    SIGKILL, and the kernel has killed nothing for lack of memory since   from outside
    melld killed it because it was silent, and it was stopped (SIGSTOP)   from outside
    anything else: a crash, an error, an endless step, out of memory      its own
"""

import re
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

from melld.kvstore.process_meter import UNREADABLE, with_children

_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE})
_REASON = re.compile(r"([\w.]*(Error|Exception|Interrupt|Exit)\b|Fatal |terminate called|what\(\):|\S+: error)")
_CHATTER = re.compile(r"warning|\b(info|debug)\b|^\[?[WI]\d{4}|\d%", re.IGNORECASE)
_SENT = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


class Fate:
    """Records what is known of one worker's end.  Created with the worker."""

    def __init__(self) -> None:
        self._memory_kills = memory_kills()
        self._killed_here = False
        self._was_stopped = False

    def about_to_kill(self, pid: int) -> None:
        """Note that melld is about to kill the process, and whether it or a rank of it is stopped.

        Later calls change nothing.
        """
        if not self._killed_here:
            self._killed_here = True
            self._was_stopped = any(map(is_stopped, with_children(pid)))

    def is_from_outside(self, exit_code: int | None) -> bool:
        """Return True if the end came from outside.  No exit code: it could not be read."""
        if self._killed_here:
            return self._was_stopped
        if exit_code is None:
            return False
        if -exit_code == signal.SIGKILL:
            return self._memory_kills is not None and memory_kills() == self._memory_kills
        return -exit_code in _SENT

    @property
    def killer(self) -> str:
        """Return who sent it SIGKILL, in words."""
        if self._killed_here:
            return "by melld"
        return (
            "from outside" if self.is_from_outside(-signal.SIGKILL) else "from outside, or by the kernel's OOM killer"
        )


def end_in_words(exit_code: int | None, killer: str, printed: Iterable[str]) -> str:
    """Say how a process ended: by which signal, or with which exit code and the reason that it printed.

    A signal from outside has nothing to do with what the process printed before.
    """
    lines = list(printed)
    reason = next((line for line in reversed(lines) if _REASON.match(line)), "")
    if exit_code is None or exit_code >= 0:
        reason = reason or next((line for line in reversed(lines) if not _CHATTER.search(line)), "")
        code = f"code {exit_code}" if exit_code is not None else "an unknown code"
        return f"exited with {code}" + (f": {reason}" if reason else "")
    number = -exit_code
    hints: dict[int, str] = {
        signal.SIGILL: ": this CPU lacks an instruction needed for the model's data type (try dtype = 'float32')",
        signal.SIGKILL: f" ({killer})",
    }
    hint = hints.get(number, f": {reason}" if reason and number in _CRASHES else "")
    return f"ended by {signal_name(number)}{hint}"


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most of those for real time
        return f"signal {number}"


def memory_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory, in any control group; None if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def is_stopped(pid: int) -> bool:
    """Return True if the process is stopped (SIGSTOP)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except UNREADABLE:
        return False
