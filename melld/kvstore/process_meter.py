"""Meter of a CPU worker's memory and processor time, from /proc.

Only reads counters, never touches the process: a worker that is gone is `lost`.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from melld.kvstore.device_reading import DeviceReading, DeviceState


def with_children(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the process and those that it has forked: a worker and its ranks, if it has several devices."""
    try:
        return [pid, *map(int, (proc / f"{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return [pid]


class _Counters(NamedTuple):
    """The counters of one process."""

    state: str
    resident_pages: int
    ticks: int


class ProcessMeter:
    """Meter of one worker, its ranks included.  Each reading gives the utilisation since the one before, in cores."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._proc, self._pid = proc, pid
        self._last: tuple[float, float] | None = None  # (monotonic seconds, CPU seconds)

    def read(self) -> DeviceReading:
        """Read the process's counters.  Takes well under a millisecond."""
        now_s = time.monotonic()
        _, *children = with_children(self._pid, self._proc)
        try:
            each = [self._counters(self._pid)]
        except (OSError, IndexError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else "unreadable"
            return DeviceReading(state=DeviceState.LOST, name="CPU", reason=f"process: {reason}")
        if each[0].state in "ZX":
            return DeviceReading(state=DeviceState.LOST, name="CPU", reason="process: has ended")
        for child in children:
            with contextlib.suppress(OSError, IndexError):  # it has ended since
                each.append(self._counters(child))
        cpu_s = sum(one.ticks for one in each) / os.sysconf("SC_CLK_TCK")
        before, self._last = self._last, (now_s, cpu_s)
        utilisation = None
        if before is not None and now_s > before[0]:
            utilisation = min(1.0, max(0.0, (cpu_s - before[1]) / (now_s - before[0]) / len(each)))
        return DeviceReading(
            state=DeviceState.OK,
            name="CPU",
            used_bytes=sum(one.resident_pages for one in each) * os.sysconf("SC_PAGE_SIZE"),
            utilisation=utilisation,
        )

    def _counters(self, pid: int) -> _Counters:
        # statm: size resident shared ..., in pages.  stat: after the name in brackets, utime and stime in ticks.
        resident_pages = int((self._proc / f"{pid}/statm").read_text().split()[1])
        fields = (self._proc / f"{pid}/stat").read_text().rpartition(")")[2].split()
        return _Counters(fields[0], resident_pages, int(fields[11]) + int(fields[12]))
