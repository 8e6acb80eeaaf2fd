"""Facts about devices: readings of one device, and the link between two.

Owns the types alone.  Never reads anything: `kvstore/nvml` and `kvstore/process_meter` do.
A value that the device does not tell is None, never 0.
"""

import enum
from collections.abc import Sequence

import msgspec


class DeviceState(enum.StrEnum):
    """State of a device, judged by its answers."""

    OK = "ok"
    LOST = "lost"  # it fell off the bus, needs a reset, or (on a CPU) its process is gone
    UNAVAILABLE = "unavailable"  # the source of the facts does not work: no driver, no library, wrong version
    LATE = "late"  # no answer before the deadline; the question stays open


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """A reading of one device.  `reason` says why something is unknown, or is empty."""

    state: DeviceState
    reason: str = ""
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    used_by_others_bytes: int | None = None
    """`used_bytes` less melld's own processes: other programs and the driver.  None where NVML hides processes."""
    others: tuple[tuple[int, int], ...] = ()
    """Those other programs: pid and bytes of each, the largest first."""
    power_w: float | None = None
    temperature_c: int | None = None
    utilisation: float | None = None
    """Between 0 and 1: the share of the last period in which the device had work.  On a CPU, of one core."""


def worst_of(readings: Sequence[DeviceReading]) -> DeviceReading:
    """Return the reading of a worker's device with the least room, with the power of all."""
    bad = [one for one in readings if one.state is not DeviceState.OK]
    worst = bad[0] if bad else max(readings, key=lambda one: one.used_by_others_bytes or 0)
    powers = [one.power_w for one in readings if one.power_w is not None]
    return msgspec.structs.replace(worst, power_w=sum(powers) if powers else None)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of this machine.  `index` is nvidia-smi's, which may differ from CUDA's: address a GPU by its `uuid`."""

    index: int
    uuid: str
    name: str | None = None
    memory_bytes: int | None = None


class Proximity(enum.IntEnum):
    """The nearest common ancestor of two GPUs, nearest first (NVML's nvmlGpuTopologyLevel_t)."""

    SAME_BOARD = 0
    ONE_SWITCH = 10
    SWITCHES = 20
    HOST_BRIDGE = 30
    NUMA_NODE = 40
    MACHINE = 50


class GpuLink(msgspec.Struct, frozen=True, kw_only=True):
    """Connection of two GPUs, as the driver reports it.  Bandwidth is measured elsewhere."""

    proximity: Proximity | None = None
    peer_read: bool | None = None
    """The first GPU can read the second one's memory over the bus."""
    nvlink: bool | None = None
