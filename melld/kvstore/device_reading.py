"""What is known of a device, and how near two devices are.

Owns the facts alone.  Never reads anything: `kvstore/nvml` and `kvstore/process_meter` do.
A value that the device does not tell is None, never 0.
"""

import enum

import msgspec


class DeviceState(enum.StrEnum):
    """Whether a device answers."""

    OK = "ok"
    LOST = "lost"  # it fell off the bus, needs a reset, or (on a CPU) its process is gone
    UNAVAILABLE = "unavailable"  # the source of the facts does not work: no driver, no library, wrong version
    LATE = "late"  # no answer before the deadline; the question still stands


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one device.  `reason` says in words why something is not known, or is empty."""

    device: str
    """The name that melld gives it: `cuda:0`, `cpu:1`."""
    state: DeviceState
    reason: str = ""
    name: str | None = None
    uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    used_by_others_bytes: int | None = None
    """`used_bytes` less what melld's own processes hold: other programs and the driver.  None where processes hide."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    utilisation: float | None = None
    """Between 0 and 1: the part of the last period in which the device had work.  On a CPU, of one core."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that is there.  `index` is nvidia-smi's, which need not be CUDA's: address a GPU by its `uuid`."""

    index: int
    uuid: str
    name: str | None = None
    memory_bytes: int | None = None


class Proximity(enum.IntEnum):
    """The nearest thing that two GPUs share, nearest first (NVML's nvmlGpuTopologyLevel_t)."""

    SAME_BOARD = 0
    ONE_SWITCH = 10
    SWITCHES = 20
    HOST_BRIDGE = 30
    NUMA_NODE = 40
    MACHINE = 50


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How two GPUs are joined, as the driver says.  What a link carries is measured, not read here."""

    proximity: Proximity | None = None
    peer_read: bool | None = None
    """The second GPU's memory can be read by the first over the bus."""
    nvlink: bool | None = None
    reason: str = ""
