"""GPU readings from the driver's management library (NVML), without a CUDA context.

Owns every call to `pynvml`.  Never raises an NVML error and never keeps a handle: a GPU can be lost, reset or come back
between two readings, so each reading looks it up by UUID.  All calls block, usually for milliseconds, on a lost GPU for
seconds: `kvstore/device_poller` calls them from threads.

    NVML's error                                          what the reading says
    GPU_IS_LOST, RESET_REQUIRED, NOT_FOUND, ...      ->   state `lost`
    no library, no driver, driver updated, ...       ->   state `unavailable`; the next call restarts NVML
    anything else about one value (NOT_SUPPORTED)    ->   that value is None
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
import pynvml

from melld.errors import ConfigError
from melld.kvstore.device_reading import Device, DeviceReading, DeviceState, GpuLink, Proximity

Value = TypeVar("Value")

LOST_CODES = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_GPU_NOT_FOUND,
    }
)
LIBRARY_CODES = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
# pynvml's own NVML_P2P_CAPS_INDEX_READ is a tuple by mistake.
P2P_READ = 0
P2P_NVLINK = 2
_LEVELS: dict[int | None, Proximity] = {level.value: level for level in Proximity}


class Discovery(msgspec.Struct, frozen=True):
    """The GPUs found, by nvidia-smi's index; `reason` says why there are none, or which could not be read."""

    devices: tuple[Device, ...] = ()
    reason: str = ""


class Nvml:
    """The library, started on first use and restarted after a failure.  Safe to call from several threads."""

    def __init__(self) -> None:
        self._started = False

    def discover(self) -> Discovery:
        """Return every GPU that answers."""
        try:
            self._start()
            found = [self._describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self._started = False
            return Discovery((), str(error))
        devices = tuple(device for device in found if isinstance(device, Device))
        return Discovery(devices, "; ".join(line for line in found if isinstance(line, str)))

    def read(
        self, uuid: str, own_pids: Collection[Collection[int]] = (), guest_pids: Collection[int] = ()
    ) -> DeviceReading:
        """Read one GPU.

        `own_pids`: of each worker on it the processes, whose memory does not count as used by others; not all of them
        need be here.  `guest_pids`: those of workers on other GPUs, which may keep a context here to read this GPU's
        blocks.
        """
        try:
            self._start()
            return _read_handle(pynvml.nvmlDeviceGetHandleByUUID(uuid), own_pids, guest_pids)
        except pynvml.NVMLError as error:
            if error.value not in LOST_CODES:
                self._started = False
            state = DeviceState.LOST if error.value in LOST_CODES else DeviceState.UNAVAILABLE
            return DeviceReading(state=state, reason=str(error))

    def link(self, first_uuid: str, second_uuid: str) -> GpuLink:
        """Return how two GPUs are connected, as far as the driver knows."""
        try:
            self._start()
            handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in (first_uuid, second_uuid)]
            asked = _Asked()
            level = asked.value("topology", lambda: pynvml.nvmlDeviceGetTopologyCommonAncestor(*handles))
            read = asked.value("peer access", lambda: pynvml.nvmlDeviceGetP2PStatus(*handles, P2P_READ))
            nvlink = asked.value("NVLink", lambda: pynvml.nvmlDeviceGetP2PStatus(*handles, P2P_NVLINK))
        except pynvml.NVMLError:
            return GpuLink()
        return GpuLink(proximity=_LEVELS.get(level), peer_read=_is_ok(read), nvlink=_is_ok(nvlink))

    def links(self, uuids: Collection[str]) -> dict[tuple[str, str], GpuLink]:
        """Return the links by (first, second): how the second GPU reads the memory of the first, for all pairs."""
        return {(one, other): self.link(other, one) for one in uuids for other in uuids if one != other}

    def _start(self) -> None:
        if not self._started:
            pynvml.nvmlInit()
            self._started = True

    def _describe(self, index: int) -> Device | str:
        """Return the GPU at `index`, or why it cannot be used."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            asked = _Asked()
            memory = asked.value("memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
            name = asked.value("name", lambda: pynvml.nvmlDeviceGetName(handle))
        except pynvml.NVMLError as error:
            if error.value in LIBRARY_CODES:
                raise
            return f"GPU {index}: {error}"
        return Device(index=index, uuid=uuid, name=name, memory_bytes=memory.total if memory is not None else None)


class _Asked:
    """Queries to one GPU, and why some had no answer."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    @property
    def reason(self) -> str:
        return "; ".join(self._reasons)

    def value(self, what: str, call: Callable[[], Value]) -> Value | None:
        """Return the value, or None if this GPU lacks it.  A lost GPU or library ends the whole reading."""
        try:
            return call()
        except pynvml.NVMLError as error:
            if error.value in LOST_CODES or error.value in LIBRARY_CODES:
                raise
            if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
                self._reasons.append(f"{what}: {error}")
            return None


def _read_handle(handle: object, own_pids: Collection[Collection[int]], guest_pids: Collection[int]) -> DeviceReading:
    asked = _Asked()
    memory = asked.value("memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    power_mw = asked.value("power", lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    rates = asked.value("utilisation", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    processes = asked.value("processes", lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    others_bytes = None
    if memory is not None and (own_bytes := _bytes_of(processes, own_pids, guest_pids)) is not None:
        others_bytes = max(0, memory.used - own_bytes)
    return DeviceReading(
        state=DeviceState.OK,
        name=asked.value("name", lambda: pynvml.nvmlDeviceGetName(handle)),
        total_bytes=memory.total if memory is not None else None,
        used_bytes=memory.used if memory is not None else None,
        used_by_others_bytes=others_bytes,
        others=_others(processes or (), {*guest_pids, *itertools.chain(*own_pids)}),
        power_w=power_mw / 1000 if power_mw is not None else None,
        temperature_c=asked.value(
            "temperature", lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        ),
        utilisation=rates.gpu / 100 if rates is not None else None,
        reason=asked.reason,
    )


def _others(processes: Sequence[Any], own_pids: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Return pid and bytes of each foreign program, largest first; 0 bytes where NVML does not say."""
    found = [(one.pid, one.usedGpuMemory or 0) for one in processes if one.pid not in own_pids]
    return tuple(sorted(found, key=lambda pair: -pair[1]))


def _bytes_of(
    processes: Sequence[object] | None, workers: Collection[Collection[int]], guests: Collection[int]
) -> int | None:
    """Return our processes' total memory; None if NVML hides a worker's (other PID namespace, no permission)."""
    if processes is None:
        return None if workers else 0
    held = {process.pid: process.usedGpuMemory for process in processes}  # type: ignore[attr-defined]
    if any(held.keys().isdisjoint(pids) for pids in workers):
        return None
    known = [held[pid] for pid in {*guests, *itertools.chain(*workers)} if pid in held]
    return None if None in known else sum(known)


def _is_ok(status: int | None) -> bool | None:
    return None if status is None else status == pynvml.NVML_P2P_STATUS_OK


def choose(devices: Sequence[Device], wanted: Sequence[int | str]) -> list[Device]:
    """Return the GPUs named in `[devices] cuda`, in that order: by nvidia-smi's index, a UUID or its beginning.

    A GPU that is named twice gets two workers.

    Raises:
        ConfigError: a name matches no GPU, or more than one.
    """
    chosen: list[Device] = []
    for name in wanted:
        found = [device for device in devices if _is_named(device, name)]
        if len(found) != 1:
            there = ", ".join(f"{device.index} ({device.uuid})" for device in devices) or "none"
            raise ConfigError("devices.cuda", f"{'no' if not found else 'more than one'} GPU {name!r}; there: {there}")
        chosen += found
    return chosen


def restrict(devices: Sequence[Device], visible: str | None) -> list[Device]:
    """Return the `devices` that CUDA_VISIBLE_DEVICES=`visible` leaves; None leaves all.

    Like CUDA, end the list at the first name that is no GPU.  NVML itself ignores that variable.
    """
    if visible is None:
        return list(devices)
    left: list[Device] = []
    for name in (part.strip() for part in visible.split(",")):
        found = [device for device in devices if _is_named(device, int(name) if name.isdecimal() else name)]
        if len(found) != 1 or found[0] in left:
            break
        left += found
    return left


def _is_named(device: Device, name: int | str) -> bool:
    if isinstance(name, int):
        return device.index == name
    return len(name) > len("GPU-") and device.uuid.startswith(name)
