"""The process that reads the fake GPUs: one JSON question a line on stdin, one JSON answer a line on stdout.

A process of its own, so that the fake library never lives in the process that runs the other tests.
"""

import asyncio
import functools
import json
import sys

import msgspec

from melld.kvstore.device_poller import DevicePoller
from melld.kvstore.nvml import Nvml
from melld.kvstore.worker_readings import WorkerDevices, WorkerReadings
from melld.migrate.topology import segments_of_gpus


class Probe:
    """What a test may ask for, by name; `renew` replaces it with a fresh one."""

    def __init__(self) -> None:
        self._nvml = Nvml()
        self._poller = DevicePoller({})
        self._workers = WorkerReadings(self._nvml)

    async def discover(self) -> object:
        return self._nvml.discover()

    async def read(self, uuid: str, own_pids: list[list[int]], guest_pids: list[int] | None = None) -> object:
        return self._nvml.read(uuid, own_pids, guest_pids or [])

    async def link(self, first: str, second: str) -> object:
        return self._nvml.link(first, second)

    async def segments(self, uuids: list[str]) -> object:
        """Return the segments that copies between these GPUs share, by name."""
        return {one.name: sorted(one.pairs) for one in segments_of_gpus(self._nvml.links(uuids))}

    async def poll(self, uuids: list[str], deadline_s: float) -> object:
        """Poll; the poller and its open questions persist from one call to the next."""
        if uuids:
            sources = {uuid: functools.partial(self._nvml.read, uuid) for uuid in uuids}
            self._poller = DevicePoller(sources, deadline_s)
        return await self._poller.read()

    async def workers(self, running: list[tuple[str, int, list[str]]]) -> object:
        """Return name, process and GPUs of each."""
        return await self._workers.read([WorkerDevices(name, pid, tuple(uuids)) for name, pid, uuids in running])


async def main() -> None:
    probe = Probe()
    for line in sys.stdin:
        question = json.loads(line)
        if question["ask"] == "renew":
            probe = Probe()
            print("null", flush=True)  # noqa: T201
            continue
        answer = await getattr(probe, question["ask"])(*question["arguments"])
        print(msgspec.json.encode(answer).decode(), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
