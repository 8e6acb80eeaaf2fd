"""Meter of a CPU worker's memory and processor time.

Only reads counters, never touches the process: a worker that is gone is `lost`.
"""

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from melld.kvstore.device_reading import DeviceReading, DeviceState

UNREADABLE = (psutil.Error, RuntimeError, ValueError)
"""What psutil raises for a process that has ended, is another user's, or ends while its files are read."""


def made_by(pid: int, thread: int) -> list[int]:
    """Return the processes that this thread has forked; none if it is gone.

    Not by psutil, which reads every process of the machine for it: 2 ms for a hundred of them, and 0.02 ms this way.
    """
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    except OSError:
        return []


def with_children(pid: int) -> list[int]:
    """Return the process and those that it has forked: a worker and its ranks, if it has several devices."""
    return [pid, *made_by(pid, pid)]


class _Counters(NamedTuple):
    """The counters of one process."""

    used_bytes: int
    cpu_s: float


class ProcessMeter:
    """Meter of one worker, its ranks included.  Each reading gives the utilisation since the one before, in cores."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last: tuple[float, float] | None = None  # (monotonic seconds, CPU seconds)

    def read(self) -> DeviceReading:
        """Read the process's counters.  Takes well under a millisecond."""
        now_s = time.monotonic()
        _, *children = with_children(self._pid)
        try:
            each = [_counters(self._pid)]
        except (psutil.ZombieProcess, psutil.NoSuchProcess):
            return DeviceReading(state=DeviceState.LOST, name="CPU", reason="process: has ended")
        except UNREADABLE as error:
            return DeviceReading(state=DeviceState.LOST, name="CPU", reason=f"process: {error}")
        for child in children:
            with contextlib.suppress(*UNREADABLE):  # it has ended since
                each.append(_counters(child))
        cpu_s = sum(one.cpu_s for one in each)
        before, self._last = self._last, (now_s, cpu_s)
        utilisation = None
        if before is not None and now_s > before[0]:
            utilisation = min(1.0, max(0.0, (cpu_s - before[1]) / (now_s - before[0]) / len(each)))
        return DeviceReading(
            state=DeviceState.OK, name="CPU", used_bytes=sum(one.used_bytes for one in each), utilisation=utilisation
        )


def _counters(pid: int) -> _Counters:
    with (process := psutil.Process(pid)).oneshot():
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            raise psutil.ZombieProcess(pid)
        times = process.cpu_times()
        return _Counters(process.memory_info().rss, times.user + times.system)
