"""Sizes of models and devices before anything is loaded: from files, settings and the machine.

Owns the guesses that each load replaces by measured figures, how many devices a worker takes, and the refusal of models
that can never fit.
"""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from melld.cluster.facts import HUB_WEIGHTS, hub_directory
from melld.config import Config, CpuDevices, ModelConfig
from melld.engine.arguments import engine_arguments
from melld.errors import ConfigError
from melld.ids import DeviceName, ModelName
from melld.kvstore.device_reading import Device
from melld.landlord import events as e
from melld.landlord.granules import granule_bytes_for

log = logging.getLogger("melld.devices")
AVAILABLE_PART = 0.9
"""The part of the machine's available memory that CPU devices may hold together, unless it is configured."""
TEMPLATE_BYTES = 250 << 20
"""What the process that workers are forked from takes, and may not have taken yet."""
WEIGHTS_PART = 0.9
"""The part of its devices that a model's weights may take: the rest is for KV and what a step needs."""
SHRINKING = ("cpu_offload_gb", "quantization", "load_format", "pipeline_parallel_size")
"""Options of vLLM with which weights on the devices differ in size from their files."""
WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.bin", "*.pt")
BYTES_OF = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
LOAD_S, WAKE_S, LOAD_BYTES_PER_S = 3.0, 0.1, 1e9
"""A first guess at how long a load takes: the start of an engine, or waking one, and reading its weights."""
BESIDE_WEIGHTS_BYTES = {"cpu": 96 << 20, "cuda": 1 << 30}
"""A first guess at what a worker takes on its device beside weights and KV: 93 MiB with the demo model on a CPU."""
UNKNOWN_BLOCK_BYTES = 1 << 18


def weights_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the size of the weights when loaded as `dtype`, from their files; 0 if those are missing."""
    stored = _stored_bytes(_directory_of_weights(model))
    described = _description(_directory_of(model))
    kept = BYTES_OF.get(str(described.get("dtype") or described.get("torch_dtype")), 0)
    if "quantization_config" in described or not kept:
        return stored
    return stored * BYTES_OF.get(dtype, kept) // kept


def _directory_of(model: ModelConfig) -> Path:
    """Return where the model's files are, or would be: a hub model may already be downloaded."""
    return _downloaded(model, ("config.json",), None) or Path(model.path)


def _directory_of_weights(model: ModelConfig) -> Path:
    """Return the directory of its weights, the only files that vLLM keeps in `download_dir`."""
    own = model.vllm_option("download_dir")
    return (_downloaded(model, HUB_WEIGHTS, own) if own else None) or _directory_of(model)


def _downloaded(model: ModelConfig, files: Sequence[str], cache: str | None) -> Path | None:
    if Path(model.path).exists():
        return None
    return hub_directory(model.path, files, cache, model.vllm_option("revision"))


def _stored_bytes(directory: Path) -> int:
    """Return the bytes of the files that vLLM would load: those in the index, else all of the first kind found."""
    try:
        index = msgspec.json.decode((directory / "model.safetensors.index.json").read_bytes(), type=_WeightsIndex)
        return sum((directory / name).stat().st_size for name in set(index.weight_map.values()))
    except (OSError, msgspec.MsgspecError):
        sizes = [sum(file.stat().st_size for file in directory.glob(pattern)) for pattern in WEIGHT_FILES]
        return next((size for size in sizes if size), 0)


class _WeightsIndex(msgspec.Struct):
    """Content of `model.safetensors.index.json`: the file of each tensor."""

    weight_map: dict[str, str]


def _description(directory: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}


def fitted(config: Config, gpus: Sequence[Device]) -> Config:
    """Return the configuration for these devices, with the number per worker set; a cluster brings its own.

    Raises:
        ConfigError: it can never work on them.
    """
    check_lending(config, gpus)
    if config.cluster.address is not None:
        return config
    check_sizes(config, gpus)
    return group_devices(config, gpus)


def group_devices(config: Config, gpus: Sequence[Device]) -> Config:
    """Return the configuration with the number of devices per worker filled in, if not given.

    It is the least that divides the devices and the model's attention heads, and on which the weights leave room.
    """
    model = config.model
    shared = len({gpu.uuid for gpu in gpus}) < len(gpus)
    if config.devices.per_worker is not None or len(config.served) > 1 or shared:
        return config
    if any(model.vllm_option(name) for name in SHRINKING):
        return config
    memory = device_memory_bytes(config, gpus)
    weights = weights_bytes(model, str(engine_arguments(config, "cuda" if gpus else "cpu").get("dtype", "")))
    size = fewest_devices(weights, min(memory), len(memory), _heads(_description(_directory_of(model))))
    if size == 1:
        return config
    log.info(
        "%s needs %s MiB and a device may hold %s: using %d devices per worker",
        *(model.names[0], f"{weights / 2**20:,.0f}", f"{min(memory) / 2**20:,.0f}", size),
    )
    devices = msgspec.structs.replace(config.devices, per_worker=size)
    return msgspec.structs.replace(config, devices=devices)


def fewest_devices(weights: int, memory: int, devices: int, heads: int) -> int:
    """Return how many of `devices` of `memory` bytes each a worker needs; if none leaves room, the most allowed.

    `heads`: the model's attention heads.  Zero means unknown; then nothing is divided.
    """
    known = memory and heads
    may = [size for size in range(1, devices + 1) if not devices % size and known and not heads % size] or [1]
    return next((size for size in may if weights <= WEIGHTS_PART * size * memory), may[-1])


def _heads(described: Mapping[str, Any]) -> int:
    text = described.get("text_config")
    found = (text if isinstance(text, dict) else described).get("num_attention_heads")
    return found if isinstance(found, int) else 0


def block_bytes_of(vllm_config: Any) -> int:
    """Return the bytes of one block of KV in all layers, as vLLM's configuration describes them."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    width = model.get_num_kv_heads(parallel) * model.get_head_size() * (1 if model.use_mla else 2)
    per_token = width * model.dtype.itemsize * model.get_num_layers(parallel)
    return int(per_token * vllm_config.cache_config.block_size) or UNKNOWN_BLOCK_BYTES


def device_memory_bytes(config: Config, gpus: Sequence[Device]) -> list[int]:
    """Return each device's memory for weights and KV together, in the order of a model's slots."""
    if not gpus:
        cpu = config.devices.cpu or CpuDevices()
        free_bytes = int(AVAILABLE_PART * max(available_bytes() - TEMPLATE_BYTES, 0))
        each = cpu.memory_limit_bytes or free_bytes // cpu.count
        return [each] * cpu.count
    shares = [sum(other.uuid == gpu.uuid for other in gpus) for gpu in gpus]
    part = max(float(model.vllm_option("gpu_memory_utilization") or 0.9) for model in config.served)
    return [int(part * (gpu.memory_bytes or 0)) // share for gpu, share in zip(gpus, shares, strict=True)]


def available_bytes(root: Path = Path("/")) -> int:
    """Return the machine's available memory, or what this process's tightest control group still allows."""
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) << 10
    named = root / "proc/self/cgroup"
    lines = named.read_text().splitlines() if named.exists() else []
    own = root / "sys/fs/cgroup" / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
            left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
            held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            left += int(held["active_file"]) + int(held["inactive_file"])  # cached files, such as weights once read
            available = min(available, max(left, 0))
    return available


def check_sizes(config: Config, gpus: Sequence[Device]) -> None:
    """Refuse a model, among several, whose weights are larger than any device.

    Raises:
        ConfigError: with the arithmetic.
    """
    kind, memory = "cuda" if gpus else "cpu", max(device_memory_bytes(config, gpus), default=0)
    for model in config.models if len(config.models) > 1 and memory else ():
        dtype = str(engine_arguments(config.alone(model), kind).get("dtype", ""))
        weights = weights_bytes(model, dtype)
        if weights > memory:
            loaded = f" as {dtype}" if dtype in BYTES_OF else ""
            raise ConfigError(
                f"[[models]] {model.names[0]}",
                f"its weights take {weights / 2**20:,.0f} MiB{loaded}, but a device may hold {memory / 2**20:,.0f} MiB "
                f"for weights and KV together: {(weights - memory) / 2**20:,.0f} MiB too much",
            )


def check_lending(config: Config, gpus: Sequence[Device]) -> None:
    """Reject lending of GPU memory that cannot work: all weights must fit next to the lent memory.

    Raises:
        ConfigError: with the reason.
    """
    key, lent = "[devices] lent_kv_bytes", config.devices.lent_bytes
    if not lent:
        return
    if not gpus:
        raise ConfigError(key, "no GPU is available; CPU devices lend their memory without this setting")
    if len(config.served) < 2:
        raise ConfigError(key, "a single model has no other to lend to")
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise ConfigError(key, "a GPU is listed twice, and its workers would each need their own memory")
    memory = min(device_memory_bytes(config, gpus))
    weights = sum(first_guess(config, model, "cuda") for model in config.served)
    if lent + weights > memory:
        told = ", ".join(f"{size / 2**20:,.0f} MiB" for size in (lent, weights, memory))
        each = "of KV memory, of weights and other worker memory, and on a device"
        raise ConfigError(key, f"all models must fit next to it, but these do not: {told} ({each})")


def first_guess(config: Config, model: ModelConfig, kind: str) -> int:
    """Estimate the memory a worker of the model needs besides KV."""
    dtype = str(engine_arguments(config.alone(model), kind).get("dtype", ""))
    return weights_bytes(model, dtype) + BESIDE_WEIGHTS_BYTES[kind]


def devices_declared(
    config: Config, gpus: Sequence[Device], names: Sequence[str], block_bytes: Iterable[int], lent: int, now_s: float
) -> list[e.DeviceDeclared]:
    """Return the devices' declarations for the Landlord, in order; `block_bytes`: of each model.

    `lent`: bytes of a GPU's memory that are lent: no weights displace them.
    """
    granule = granule_bytes_for(block_bytes)
    memories = device_memory_bytes(config, gpus)
    return [
        e.DeviceDeclared(now_s, DeviceName(name), lent or memory, granule)
        for name, memory in zip(names, memories, strict=True)
    ]


def model_declared(
    config: Config, kind: str, key: ModelName, block_bytes: int, own_bytes: int, lent: int, now_s: float
) -> e.ModelDeclared:
    """Return a model's declaration for the Landlord before anything is loaded.  `config`: of this model alone.

    `own_bytes`: KV memory that its workers have beside the arena.  `lent`: what is lent of a GPU.
    """
    model, idle = config.model, config.idle
    held = first_guess(config, model, kind)
    weights = held - BESIDE_WEIGHTS_BYTES[kind]
    kept_s = (idle.sleep_after_s or 0.0) + idle.stop_after_s
    return e.ModelDeclared(
        now_s,
        key,
        0 if lent else held + own_bytes,
        block_bytes,
        load_s=LOAD_S + weights / LOAD_BYTES_PER_S,
        wake_s=WAKE_S + weights / LOAD_BYTES_PER_S,
        weight=model.weight,
        pinned=model.pinned,
        dozes=idle.stop_after_s > 0 and not lent and (kind == "cpu" or idle.cached_bytes > 0),
        dozing_bytes=BESIDE_WEIGHTS_BYTES[kind],
        keep_alive_s=kept_s if model.keep_alive_s is None else model.keep_alive_s,
        stop_after_s=idle.stop_after_s,
    )
