"""From the configuration and the machine to the places for workers.

Owns the choice of devices.  Asks NVML (no CUDA context) and nothing else.
"""

from collections.abc import Mapping

from melld.config import Config, CpuDevices, DevicesConfig
from melld.engine import wire
from melld.engine.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT, engine_arguments
from melld.engine.supervisor import Slot
from melld.errors import ConfigError
from melld.ids import WorkerId
from melld.kvstore.device_reading import Device
from melld.kvstore.nvml import Nvml, choose, restrict


def find_gpus(devices: DevicesConfig, nvml: Nvml, environment: Mapping[str, str]) -> list[Device]:
    """The GPUs to be used: none when CPU devices are asked for, or when the machine has no GPU and none is asked for.

    Raises:
        ConfigError: a GPU is asked for that is not there.
    """
    if devices.cpu is not None:
        return []
    found = nvml.discover()
    visible = restrict(list(found.devices), environment.get("CUDA_VISIBLE_DEVICES"))
    if devices.cuda is None:
        return visible
    if not visible:
        raise ConfigError("[devices] cuda", f"no GPU is to be found: {found.reason or 'NVML lists none'}")
    return choose(visible, devices.cuda)


def make_slots(config: Config, gpus: list[Device], environment: Mapping[str, str]) -> list[Slot]:
    """One place per device.  What the user's own environment says of vLLM goes before melld's defaults."""
    kind = "cuda" if gpus else "cpu"
    defaults = COMMON_ENVIRONMENT | (CPU_ENVIRONMENT if kind == "cpu" else {})
    settings = {key: environment.get(key, value) for key, value in defaults.items()}
    arguments = engine_arguments(config, kind)
    uuids = [gpu.uuid for gpu in gpus]
    names = [f"cuda:{gpu.index}" for gpu in gpus]
    if kind == "cpu":
        names = [f"cpu:{index}" for index in range((config.devices.cpu or CpuDevices()).count)]
    slots = []
    for index, name in enumerate(names):
        own = uuids[index] if uuids else None
        spec = wire.WorkerSpec(
            worker=f"w{index}",
            model_path=config.model.path,
            device_kind=kind,
            visible_devices=(own, *(uuid for uuid in uuids if uuid != own)) if own else (),
            engine_arguments=arguments,
            environment=settings,
            copy_rules=wire.CopyRules(
                checksum=config.migration.checksum, bytes_per_s=config.migration.link_limit_bytes_per_s
            ),
        )
        slots.append(Slot(worker=WorkerId(spec.worker), device=name, uuid=own, spec=spec))
    return slots
