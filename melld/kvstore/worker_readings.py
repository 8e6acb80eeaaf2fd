"""Readings of the devices of this machine's workers: of a worker's GPUs, or of its process if it runs on the CPU.

Owns which process each worker is read with.  The daemon reads its own workers, an agent those of its machine.
"""

from collections.abc import Callable, Collection, Sequence

import msgspec

from melld.kvstore.device_poller import DevicePoller
from melld.kvstore.device_reading import DeviceReading, worst_of
from melld.kvstore.nvml import Nvml
from melld.kvstore.process_meter import ProcessMeter, with_children


class WorkerDevices(msgspec.Struct, frozen=True):
    """A worker's process on this machine, and the UUIDs of its GPUs; none: it runs on the CPU."""

    worker: str
    pid: int
    uuids: tuple[str, ...]


class WorkerReading(msgspec.Struct, frozen=True):
    """A reading, and the process that the worker had then."""

    pid: int
    device: DeviceReading


class WorkerReadings:
    """Reads all of them.  `nvml`: None where no worker has a GPU."""

    def __init__(self, nvml: Nvml | None) -> None:
        self._nvml = nvml
        self._poller = DevicePoller({})
        self._last: dict[str, WorkerDevices] = {}
        self._running: Sequence[WorkerDevices] = ()

    async def read(self, running: Sequence[WorkerDevices]) -> dict[str, WorkerReading]:
        """Return a reading by worker, including the devices of workers that have ended."""
        self._running = running
        for one in running:
            if self._last.get(one.worker) != one:
                self._last[one.worker] = one
                self._poller.set_source(one.worker, self._reader(one))
        found = await self._poller.read()
        return {worker: WorkerReading(self._last[worker].pid, reading) for worker, reading in found.items()}

    def forget_all_but(self, workers: Collection[str]) -> None:
        """Read the devices of these workers only: the others are gone for good, as those of a removed model."""
        for worker in self._last.keys() - workers:
            del self._last[worker]
            self._poller.remove(worker)

    def _reader(self, one: WorkerDevices) -> Callable[[], DeviceReading]:
        nvml = self._nvml
        if not one.uuids or nvml is None:
            return ProcessMeter(one.pid).read
        return lambda: worst_of([nvml.read(uuid, *self._pids(uuid)) for uuid in one.uuids])

    def _pids(self, uuid: str) -> tuple[list[list[int]], list[int]]:
        """Return the pids of each worker on that device, and of all others, ranks included: none counts as foreign."""
        own = [with_children(one.pid) for one in self._running if uuid in one.uuids]
        guests = [pid for one in self._running if uuid not in one.uuids for pid in with_children(one.pid)]
        return own, guests
