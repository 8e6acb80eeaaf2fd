"""vLLM's engine arguments for a device, the same for the daemon's processors and for every worker.

Both sides build the same `VllmConfig` from the same settings; nothing is pickled from one to the other.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from melld.config import AdapterConfig, Config, CpuDevices
from melld.engine.model_files import answer_formats
from melld.engine.vllm_options import check_option, frontend_options
from melld.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

# Settings for a CPU worker to start in seconds and run on one core (the user's settings win): no bfloat16, whose
# instructions can be illegal where AMX is advertised but not usable; no compilation; small blocks; the longest context
# that its KV cache has room for.
CPU_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 64,
    "max_model_len": -1,
}
CPU_ENVIRONMENT = {
    # Packages that are imported ask PyTorch whether there is a GPU.  Its CUDA build, which computes on CPUs too, would
    # ask the driver, after which no fork of this process may use CUDA: every worker would import everything anew.
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Compiling the sampler took 17 s of the first sampled request.
    "TORCHDYNAMO_DISABLE": "1",
    # oneDNN keeps a compiled kernel for each batch size that it has seen, 1024 by default: hundreds of megabytes that a
    # worker grows by in its first hours.  vLLM's layers keep the 32 that each used last besides.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
# Where GPU memory is lent: only vLLM's first runner lets blocks be moved (`residency.arena`).
LENDING_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
# One process per device, and no usage reports.
COMMON_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    # As many as a list may have here; `[server] max_stop_strings` limits them.
    "VLLM_MAX_STOP_STRINGS": "1000",
    # numpy's BLAS would start threads in the template, and a fork copies only the calling thread.
    "OPENBLAS_NUM_THREADS": "1",
}


LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Of vLLM's values of `max_lora_rank` its default and those above."""

# torch's allocator maps expandable segments with CUDA's virtual memory calls, for which CUDA IPC has no handles.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# A worker begins the most urgent request first, and where blocks run out preempts the least urgent.
BY_PRIORITY = {"scheduling_policy": "priority"}

# vLLM's front end sends an image to its engine once, and then only its hash.  Here any worker may get the next request,
# so every request carries its images, as in vLLM when several front ends share an engine.
IMAGES_TRAVEL_WHOLE = {"_api_process_count": 2}


def engine_arguments(config: Config, device_kind: str) -> dict[str, Any]:
    """Return the keyword arguments of `AsyncEngineArgs` for one worker on a device of this kind.

    Raises:
        ConfigError: `[model.vllm]` names an option that melld refuses, or one that vLLM lacks.
    """
    own = {key.replace("-", "_"): value for key, value in config.model.vllm.items()}
    for key in own:
        check_option(key)
    arguments: dict[str, Any] = {"distributed_executor_backend": "uni", "disable_log_stats": False}
    arguments |= BY_PRIORITY | IMAGES_TRAVEL_WHOLE
    if config.devices.group_size > 1:
        arguments |= {"distributed_executor_backend": "mp", "tensor_parallel_size": config.devices.group_size}
    if device_kind == "cpu":
        arguments |= CPU_ARGUMENTS
        arguments["kv_cache_memory_bytes"] = (config.devices.cpu or CpuDevices()).kv_cache_bytes
    arguments |= _lora_arguments(config.model.lora, device_kind)
    own |= answer_formats(config.model).options
    return arguments | {key: value for key, value in own.items() if key not in frontend_options()}


def _lora_arguments(adapters: Sequence[AdapterConfig], device_kind: str) -> dict[str, Any]:
    """Return the options for these adapters: memory for all at once, so that none is reloaded later.

    On a CPU vLLM gives requests without an adapter that of the last slot if others have one: the last stays empty.

    Raises:
        ConfigError: a directory holds no adapter.
    """
    if not adapters:
        return {}
    slots = len(adapters) + (device_kind == "cpu")
    ranks = [LORA_RANKS[0], *(rank for adapter in adapters if (rank := _rank_of(adapter)) is not None)]
    most = next((rank for rank in LORA_RANKS if rank >= max(ranks)), LORA_RANKS[-1])
    return {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": most}


def _rank_of(adapter: AdapterConfig) -> int | None:
    """Return the adapter's rank; None if it is not downloaded yet."""
    directory = Path(adapter.path).expanduser()
    if not directory.exists() and not adapter.path.startswith((".", "/", "~")):
        return None
    try:
        return int(json.loads((directory / "adapter_config.json").read_bytes())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{adapter.path} contains no adapter: it needs adapter_config.json and adapter_model.safetensors"
        raise ConfigError(f"[[model.lora]] {adapter.name}", reason) from error


def async_scheduling_told(config: Config, device_kind: str) -> str:
    """Describe whether and why a worker on this kind of device uses async scheduling."""
    if device_kind == "cpu":
        return "off (not supported by vLLM on CPUs)"
    return (
        "off (set in [model.vllm])" if engine_arguments(config, device_kind).get("async_scheduling") is False else "on"
    )


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's allocator variables with expandable segments off, because KV memory is shared by CUDA IPC."""
    asking = {name: environment.get(name, "") for name in ALLOCATOR_VARIABLES}
    return {
        name: ",".join(
            "expandable_segments:False" if option.strip().startswith("expandable_segments") else option
            for option in value.split(",")
        )
        for name, value in asking.items()
        if "expandable_segments" in value
    }


def async_engine_args(model_path: str, arguments: dict[str, Any]) -> "AsyncEngineArgs":
    """Return the arguments from which vLLM builds its configuration.  Imports vLLM."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(model=model_path, **arguments)


def engine_config(arguments: "AsyncEngineArgs") -> "VllmConfig":
    """Build vLLM's configuration with the defaults of `vllm serve`.  Slow: it reads the model's files.

    vLLM's defaults of tokens per step and requests at once depend on the caller
    (`vllm.engine.arg_utils.EngineArgs.get_batch_defaults`).
    """
    from vllm.usage.usage_lib import UsageContext

    if arguments.reasoning_parser_plugin:
        import_parsers("reasoning_parser_plugin", arguments.reasoning_parser_plugin)
    inspect_models_here()
    return arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def inspect_models_here() -> None:
    """Have vLLM inspect a model's class in this process on CPUs, where nothing forbids it.

    vLLM inspects a class that it has not seen yet in a process of its own, which imports all of vLLM for it: 13 s of
    processor, at a first start in each worker and in the daemon.  It does so to keep CUDA out of the parent
    (`vllm.model_executor.models.registry`).
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda inspect: inspect()  # noqa: SLF001


def import_parsers(option: str, file: str) -> None:
    """Import the operator's file of parsers into this process, as vLLM's launcher, which is not used here, would do.

    Raises:
        ConfigError: the file cannot be imported.
    """
    from vllm.utils.import_utils import import_plugin

    if import_plugin(file) is None:
        raise ConfigError(f"[model.vllm] {option}", f"{file} cannot be imported: see the log")
