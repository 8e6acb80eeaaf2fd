"""Chooses the devices and makes a slot for each worker, from the configuration and the machine.

Asks NVML only, so no CUDA context is created.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from melld.config import Config, CpuDevices, DevicesConfig
from melld.daemon.preflight import check_roles, promised_by
from melld.engine.arguments import (
    COMMON_ENVIRONMENT,
    CPU_ENVIRONMENT,
    LENDING_ENVIRONMENT,
    engine_arguments,
    without_expandable_segments,
)
from melld.engine.fleet.place import Slot
from melld.engine.wire.spec import CopyRules, StepLimit, WorkerSpec
from melld.errors import ConfigError
from melld.ids import WorkerId
from melld.kvstore.device_reading import Device
from melld.kvstore.nvml import Nvml, choose, restrict
from melld.landlord.division import Division
from melld.scheduler.policies.slo.policy import MellSlo

Each = TypeVar("Each")
LEAST_UTILIZATION = 0.01
STEP_OF_MEAN = 2.0
"""How many times the promised mean a single step may take with `mell-slo`."""


def find_gpus(devices: DevicesConfig, nvml: Nvml, environment: Mapping[str, str]) -> list[Device]:
    """Return the GPUs to use: none if CPU devices are configured, or if no device is and the machine has no GPU.

    Raises:
        ConfigError: a configured GPU is not there, or the devices do not make whole workers.
    """
    gpus = [] if devices.cpu is not None else _gpus(devices, nvml, environment)
    each, count = devices.group_size, len(gpus) or (devices.cpu or CpuDevices()).count
    if count % each:
        whole = f"use {each} devices, or a multiple of {each}"
        raise ConfigError("[devices] per_worker", f"{count} devices cannot be divided into workers of {each}: {whole}")
    for group in _groups(gpus, each):
        if len({gpu.uuid for gpu in group}) < len(group):
            names = ", ".join(str(gpu.index) for gpu in group)
            raise ConfigError("[devices] cuda", f"one worker would get GPUs {names}: each GPU can only be in it once")
    return gpus


def _gpus(devices: DevicesConfig, nvml: Nvml, environment: Mapping[str, str]) -> list[Device]:
    found = nvml.discover()
    visible = restrict(list(found.devices), environment.get("CUDA_VISIBLE_DEVICES"))
    if devices.cuda is None:
        return visible
    if not visible:
        raise ConfigError("[devices] cuda", f"no GPU found: {found.reason or 'NVML lists none'}")
    return choose(visible, devices.cuda)


def _groups(devices: Sequence[Each], each: int) -> list[Sequence[Each]]:
    """Return the devices of each worker: neighbours in the order of the configuration."""
    return [devices[start : start + each] for start in range(0, len(devices), each)]


def kind_of(gpus: Sequence[Device]) -> str:
    """Return the kind of all devices."""
    return "cuda" if gpus else "cpu"


def worker_environment(kind: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the workers' common environment; the user's takes precedence over melld's defaults for vLLM."""
    defaults = COMMON_ENVIRONMENT | (CPU_ENVIRONMENT if kind == "cpu" else {})
    return {key: environment.get(key, value) for key, value in defaults.items()}


def slots_by_model(config: Config, gpus: list[Device], environment: Mapping[str, str]) -> list[list[Slot]]:
    """Return the slots of each model; none for a cluster, whose machines bring theirs.

    Raises:
        ConfigError: a worker that there is not has a role.
    """
    if config.cluster.address is not None:
        return [[]]
    alone = [config.alone(model) for model in config.served]
    slots = [make_slots(one, gpus, environment, number, len(alone)) for number, one in enumerate(alone)]
    check_roles(config, [slot.worker for of_one in slots for slot in of_one])
    return slots


def make_slots(
    config: Config, gpus: list[Device], environment: Mapping[str, str], model: int = 0, models: int = 1
) -> list[Slot]:
    """Return one slot per worker of a model, the number `model` of `models` that share the devices."""
    kind = kind_of(gpus)
    settings = worker_environment(kind, environment)
    arguments = engine_arguments(config, kind)
    shares = Counter(gpu.uuid for gpu in gpus)
    uuids = [gpu.uuid for gpu in gpus]
    sleeps = gpus and models > 1 and config.idle.cached_bytes and not config.devices.lent_bytes
    each = config.devices.group_size
    suffixes = _suffixes(gpus, shares) or [str(index) for index in range((config.devices.cpu or CpuDevices()).count)]
    names = [f"{kind}:{'+'.join(group)}" for group in _groups(suffixes, each)]
    slots = []
    for index, name in enumerate(names):
        own = uuids[index * each : (index + 1) * each]
        most = max((shares[one] for one in own), default=0)
        worker = f"w{model * len(names) + index}"
        spec = WorkerSpec(
            worker=worker,
            model_path=config.model.path,
            device_kind=kind,
            visible_devices=tuple(dict.fromkeys((*own, *uuids))),
            engine_arguments=arguments
            | ({"enable_sleep_mode": True} if sleeps else {})
            | (_share(arguments, name, most * models, is_shared=most > 1) if own else {}),
            environment=settings | (without_expandable_segments(environment) if own else {}),
            copy_rules=CopyRules(
                checksum=config.migration.checksum, bytes_per_s=config.migration.link_limit_bytes_per_s
            ),
            step_limit=_step_limit(config),
            ttft_s=config.targets.ttft_s,
            age_s=config.priorities.age_s,
        )
        slots.append(Slot(worker=WorkerId(spec.worker), device=name, uuids=tuple(own), spec=spec))
    return slots


def sized(spec: WorkerSpec, division: Division) -> WorkerSpec:
    """Return the specification of a GPU's worker with the KV memory that its model is given, unless it has a size.

    With lent memory vLLM need not look for any: the device may be all but full.
    """
    arguments, environment = dict(spec.engine_arguments), dict(spec.environment)
    if division.lent_bytes:
        arguments |= {"kv_cache_memory_bytes": division.lent_bytes, "gpu_memory_utilization": LEAST_UTILIZATION}
        environment = LENDING_ENVIRONMENT | environment
    elif division.own_bytes:
        arguments.setdefault("kv_cache_memory_bytes", division.own_bytes)
    return msgspec.structs.replace(spec, engine_arguments=arguments, environment=environment)


def _step_limit(config: Config) -> StepLimit | None:
    """Return how long a step with prompts may take beside requests that decode; None: no limit.

    `mell-slo` promises a mean over an answer and places prompts by what the answers beside them can bear.  If each step
    were cut at the target, first tokens would be late and every answer beside a prompt just at the edge.
    """
    if config.scheduler.policy != MellSlo.name:
        return None if config.targets.itl_s is None else StepLimit(config.targets.itl_s)
    targets = promised_by(config)
    assert targets.itl_s is not None
    return StepLimit(STEP_OF_MEAN * targets.itl_s, STEP_OF_MEAN * targets.itl_steps)


def _suffixes(gpus: list[Device], shares: Mapping[str, int]) -> list[str]:
    """Return the suffixes of the devices' names: `0` for `cuda:0`, or `0.0`, `0.1` where workers share one GPU."""
    seen: Counter[str] = Counter()
    suffixes = []
    for gpu in gpus:
        suffixes.append(f"{gpu.index}" + (f".{seen[gpu.uuid]}" if shares[gpu.uuid] > 1 else ""))
        seen[gpu.uuid] += 1
    return suffixes


def _share(arguments: Mapping[str, Any], device: str, workers: int, *, is_shared: bool) -> dict[str, Any]:
    """Return the arguments by which `workers` share a GPU.

    vLLM sizes its KV cache by the GPU's free memory, which a second worker starting beside it changes: so the size
    must be configured.

    Raises:
        ConfigError: a model's workers share the GPU (`is_shared`), and the size of their KV caches is not configured.
    """
    if workers == 1:
        return {}
    if "kv_cache_memory_bytes" not in arguments and is_shared:
        key, example = "[model.vllm] kv_cache_memory_bytes", 8 << 30
        raise ConfigError(key, f"{device} shares its GPU: set the size of each worker's KV cache, such as {example}")
    return {"gpu_memory_utilization": arguments.get("gpu_memory_utilization", 0.9) / workers}
