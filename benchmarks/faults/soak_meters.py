"""What a soak looks at: the memory, descriptors, threads and shared memory of processes, and whether they stay flat.

Reads /proc alone, and touches no process.
"""

import math
import os
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.faults.checker import descendants, is_there

KV_MAPPING = re.compile(r"([0-9a-f]+:[0-9a-f]+) (\d+)\s+/memfd:melld-kv")
DEV_SHM = re.compile(r"(/dev/shm/\S+)")
SURE = 3.0
"""A slope of fewer standard errors is none."""
SPAN_S = 120.0
"""Over less no slope is told."""
RISE_PER_HOUR = 0.02
"""What memory may rise in an hour, as a part of itself: less is not told from allocators that have not settled yet."""


class Reading(msgspec.Struct, frozen=True):
    """One process at one time.  `at_s` and `age_s` in seconds; `own_bytes`: memory that nobody shares, beside KV."""

    at_s: float
    role: str
    pid: int
    age_s: float
    rss_bytes: int
    own_bytes: int
    descriptors: int
    threads: int
    kv_memories: frozenset[str]
    """The workers' KV memories that it maps, its own included, by inode."""
    dev_shm: frozenset[str]
    """Files of /dev/shm that it maps or has open."""


def read_process(role: str, pid: int) -> Reading | None:
    """Return the process now; None when it is gone, or goes meanwhile."""
    proc = Path("/proc", str(pid))
    try:
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        rollup = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc / "smaps_rollup").read_text(), re.MULTILINE))
        maps = (proc / "maps").read_text()
        descriptors = list((proc / "fd").iterdir())
        targets = [_target(descriptor) for descriptor in descriptors]
    except (OSError, IndexError):
        return None
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return Reading(
        at_s=time.monotonic(),
        role=role,
        pid=pid,
        age_s=uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"),
        rss_bytes=int(rollup.get("Rss", 0)) * 1024,
        own_bytes=(int(rollup.get("Private_Dirty", 0)) - int(rollup.get("Pss_Shmem", 0))) * 1024,
        descriptors=len(descriptors),
        threads=int(fields[17]),
        kv_memories=frozenset(f"{device} {inode}" for device, inode in KV_MAPPING.findall(maps)),
        dev_shm=frozenset(DEV_SHM.findall("\n".join([maps, *targets]))),
    )


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


def read_all(daemon: int, status: Any) -> list[Reading]:
    """Return the daemon with this process number and status, its template process and its workers."""
    workers = {worker["pid"]: worker["worker"] for worker in status["workers"] if worker["pid"]}
    roles = {daemon: "daemon"} | {pid: workers.get(pid, "template") for pid in descendants(daemon)}
    found = [read_process(role, pid) for pid, role in roles.items() if is_there(pid)]
    return [reading for reading in found if reading is not None]


class Trend(msgspec.Struct, frozen=True):
    """How a quantity goes with time, over one or several lives: one slope for all, each from its own level."""

    points: int
    lives: int
    level: float
    """The mean."""
    spread: float
    """The standard deviation about the slope."""
    slope_per_hour: float
    error_per_hour: float
    """The slope's standard error."""

    @property
    def is_flat(self) -> bool:
        """Return True if it does not rise, or by less than counts."""
        is_sure = self.slope_per_hour > SURE * self.error_per_hour
        return not is_sure or self.slope_per_hour <= RISE_PER_HOUR * self.level

    def in_mib(self) -> str:
        """Return it in words, for a quantity in bytes."""
        mib = 2**20
        return (
            f"{self.level / mib:.1f} MiB, slope {self.slope_per_hour / mib:+.2f} MiB/h, its standard error "
            f"{self.error_per_hour / mib:.2f}, spread {self.spread / mib:.2f} MiB, {self.points} points of {self.lives}"
        )


def trend(lives: Iterable[Sequence[tuple[float, float]]]) -> Trend | None:
    """Least squares over points (seconds, quantity) of each life; None where these are too few or too close."""
    long_enough = [life for life in lives if len(life) > 1]
    if not any(life[-1][0] - life[0][0] >= SPAN_S for life in long_enough):
        return None
    centred = []
    for life in long_enough:
        middle_s = statistics.fmean(at_s for at_s, _ in life)
        level = statistics.fmean(value for _, value in life)
        centred += [(at_s - middle_s, value - level) for at_s, value in life]
    freedom = len(centred) - len(long_enough) - 1
    width = sum(at_s**2 for at_s, _ in centred)
    if freedom < 2:
        return None
    slope = sum(at_s * value for at_s, value in centred) / width
    spread = math.sqrt(sum((value - slope * at_s) ** 2 for at_s, value in centred) / freedom)
    return Trend(
        points=len(centred),
        lives=len(long_enough),
        level=statistics.fmean(value for life in long_enough for _, value in life),
        spread=spread,
        slope_per_hour=slope * 3600,
        error_per_hour=spread / math.sqrt(width) * 3600,
    )


def climbs(counts: Sequence[int]) -> bool:
    """Return True if the last third of these counts lies wholly above all before it, as a leak's does."""
    cut = len(counts) * 2 // 3
    return 0 < cut < len(counts) and min(counts[cut:]) > max(counts[:cut])
