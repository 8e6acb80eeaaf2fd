"""Detects other programs that fill a worker's GPU; the worker waits until they are gone.

Owns what a worker needs to find free.  `kvstore.capacity` says how much a running one gives way.
"""

import contextlib

import psutil

from melld.engine.fleet.life import State
from melld.engine.fleet.place import Place
from melld.engine.fleet.supervisor import Supervisor
from melld.kvstore.capacity import is_filled
from melld.kvstore.device_reading import DeviceReading

VLLM_PART = 0.92
"""The part of a GPU that vLLM wants to find free at a start, unless it is told otherwise."""


def look_for_obstacle(place: Place, supervisor: Supervisor, reading: DeviceReading) -> None:
    """Keep a worker that could not start from trying again while other programs fill its GPU."""
    part = float(place.slot.spec.engine_arguments.get("gpu_memory_utilization", VLLM_PART))
    if not is_filled(reading, part):
        if place.life.obstacle:
            supervisor.unblock(place)
    elif place.life.state is State.FAILED and (place.life.failed_starts or place.life.obstacle):
        supervisor.block(place, f"{occupants(reading)} of {place.slot.device}, of which it needs {part:.0%}")


def occupants(reading: DeviceReading) -> str:
    """Return the other programs that hold GPU memory, largest first, as text."""
    named = []
    for pid, nbytes in reading.others[:3]:
        with contextlib.suppress(psutil.Error):
            named.append(f"{psutil.Process(pid).name()} (pid {pid}) holds {nbytes / 2**20:,.0f} MiB")
    return ", ".join(named) or f"other programs hold {(reading.used_by_others_bytes or 0) / 2**20:,.0f} MiB"
