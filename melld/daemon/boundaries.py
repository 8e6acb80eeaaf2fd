"""Settings of the boundaries of this daemon: where they are saved, and what they depend on.

Owns the fingerprint: figures measured on another machine, with another model or with other settings are not used.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from melld import __version__
from melld.config import Config
from melld.control.runtime_directory import runtime_directory
from melld.driver.boundaries import BoundarySettings
from melld.engine.fleet.place import Slot
from melld.engine.pin import VLLM_VERSION
from melld.kvstore.device_reading import Device, GpuLink
from melld.migrate.boundaries import Boundaries, Segment
from melld.migrate.topology import segments_of_cpus, segments_of_gpus
from melld.scheduler.policies.fit import BestFit, MostFree, WorstFit

FILE = "boundaries.json"
NEVER_MOVE = frozenset({BestFit.name, WorstFit.name, MostFree.name})


def boundary_settings(
    config: Config,
    slots: Sequence[Slot],
    gpus: Sequence[Device],
    joined: Mapping[tuple[str, str], GpuLink],
    environment: Mapping[str, str],
) -> BoundarySettings:
    """Return what the boundaries between these workers depend on, and where they are kept.

    `joined`: how the second of two GPUs, by UUID, reads the first one's memory.
    """
    migration, epoch_s = config.migration, config.scheduler.epoch_ms / 1e3
    engines = [slot.spec.engine_arguments for slot in slots]
    depends_on = {"engines": engines, "migration": msgspec.to_builtins(migration)}
    if config.cluster.kv == "nixl":
        depends_on["network"] = config.cluster.kv_interface
    return BoundarySettings(
        file=state_directory(environment, runtime_directory(config.server.runtime_directory, environment)) / FILE,
        fingerprint=fingerprint_of(", ".join(gpu.uuid for gpu in gpus) or cpu_name(), config.model.path, depends_on),
        epoch_s=epoch_s,
        share=migration.step_slowdown,
        read=migration.boundaries != "default",
        measure_unasked=migration.boundaries == "auto" and config.scheduler.policy not in NEVER_MOVE,
        segments=segments_between(slots, joined, Boundaries().for_epochs_of(epoch_s).other_link_bytes),
    )


def segments_between(
    slots: Sequence[Slot], joined: Mapping[tuple[str, str], GpuLink], nbytes: int
) -> tuple[Segment, ...]:
    """Return what copies between the workers share; each segment is taken to carry `nbytes` per epoch."""
    cpus = [slot.worker for slot in slots if slot.uuid is None]
    pairs = [(one, other) for one in slots for other in slots if one.uuid and other.uuid and one.uuid != other.uuid]
    links = {
        (one.worker, other.worker): joined.get((str(one.uuid), str(other.uuid)), GpuLink()) for one, other in pairs
    }
    return segments_of_cpus(cpus, nbytes) + segments_of_gpus(links, nbytes)


def state_directory(environment: Mapping[str, str], runtime: Path) -> Path:
    """Return where figures outlive the daemon: the service manager's `$STATE_DIRECTORY`, else the runtime directory."""
    managed = environment.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(managed) if managed else runtime


def fingerprint_of(hardware: str, model: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what the figures depend on.  A model's directory counts by its config.json, not by its path."""
    described = Path(model) / "config.json"
    what = described.read_bytes() if described.is_file() else model.encode()
    return {
        "hardware": hardware,
        "model": hashlib.sha256(what).hexdigest()[:16],
        "melld": __version__,
        "vllm": VLLM_VERSION,
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16],
    }


def cpu_name() -> str:
    """Return the number of processors and their name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} x {name}"
