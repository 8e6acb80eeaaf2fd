"""Meter of a CPU worker's memory and processor time, from /proc.

Only reads counters, never touches the process: a worker that is gone is `lost`.
"""

import os
import time
from pathlib import Path

from melld.kvstore.device_reading import DeviceReading, DeviceState


class ProcessMeter:
    """Meter of one worker process.  Each reading gives the utilisation since the one before, in cores."""

    def __init__(self, device: str, pid: int, proc: Path = Path("/proc")) -> None:
        self._device = device
        self._directory = proc / str(pid)
        self._last: tuple[float, float] | None = None  # (monotonic seconds, CPU seconds)

    def read(self) -> DeviceReading:
        """Read the process's counters.  Takes well under a millisecond."""
        now_s = time.monotonic()
        try:
            # statm: size resident shared ..., in pages.  stat: after the name in brackets, utime and stime in ticks.
            resident_pages = int((self._directory / "statm").read_text().split()[1])
            fields = (self._directory / "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else "unreadable"
            return DeviceReading(device=self._device, state=DeviceState.LOST, name="CPU", reason=f"process: {reason}")
        if fields[0] in "ZX":
            return DeviceReading(device=self._device, state=DeviceState.LOST, name="CPU", reason="process: has ended")
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        before, self._last = self._last, (now_s, cpu_s)
        utilisation = None
        if before is not None and now_s > before[0]:
            utilisation = min(1.0, max(0.0, (cpu_s - before[1]) / (now_s - before[0])))
        return DeviceReading(
            device=self._device,
            state=DeviceState.OK,
            name="CPU",
            used_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
            utilisation=utilisation,
        )
