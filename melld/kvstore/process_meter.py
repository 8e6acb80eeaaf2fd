"""Meter of a CPU worker's memory and processor time, from /proc.

Only reads counters, never touches the process: a worker that is gone is `lost`.
"""

import os
import time
from pathlib import Path

from melld.kvstore.device_reading import DeviceReading, DeviceState


def with_children(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the process and those that it has forked: a worker and its ranks, if it has several devices."""
    try:
        return [pid, *map(int, (proc / f"{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return [pid]


class ProcessMeter:
    """Meter of one worker, its ranks included.  Each reading gives the utilisation since the one before, in cores."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._proc, self._pid = proc, pid
        self._last: tuple[float, float] | None = None  # (monotonic seconds, CPU seconds)

    def read(self) -> DeviceReading:
        """Read the process's counters.  Takes well under a millisecond."""
        now_s = time.monotonic()
        try:
            # statm: size resident shared ..., in pages.  stat: after the name in brackets, utime and stime in ticks.
            each = [self._proc / str(pid) for pid in with_children(self._pid, self._proc)]
            resident_pages = sum(int((one / "statm").read_text().split()[1]) for one in each)
            stats = [(one / "stat").read_text().rpartition(")")[2].split() for one in each]
        except (OSError, IndexError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else "unreadable"
            return DeviceReading(state=DeviceState.LOST, name="CPU", reason=f"process: {reason}")
        if stats[0][0] in "ZX":
            return DeviceReading(state=DeviceState.LOST, name="CPU", reason="process: has ended")
        cpu_s = sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")
        before, self._last = self._last, (now_s, cpu_s)
        utilisation = None
        if before is not None and now_s > before[0]:
            utilisation = min(1.0, max(0.0, (cpu_s - before[1]) / (now_s - before[0]) / len(each)))
        return DeviceReading(
            state=DeviceState.OK,
            name="CPU",
            used_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
            utilisation=utilisation,
        )
