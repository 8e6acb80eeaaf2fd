"""vLLM's engine arguments for a device: one rule for the daemon's processors and for every worker.

Both sides build the same `VllmConfig` from the same words; nothing is pickled from one to the other.
"""

import ast
import importlib.util
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from melld.config import SERVED_MODEL_NAME, Config, CpuDevices
from melld.errors import ConfigError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

# What a CPU worker needs to start in seconds and run on one core (the user's own words win): no bfloat16, whose
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
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Compiling the sampler took 17 s of the first sampled request.
    "TORCHDYNAMO_DISABLE": "1",
    # oneDNN keeps a compiled kernel for each batch size that it has seen, 1024 by default: hundreds of megabytes that a
    # worker grows by in its first hours.  vLLM's layers keep the 32 that each used last besides.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
# Where vLLM's engine runs the request's every step, one process a device, and tells nobody about it.
COMMON_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
# The options of `vllm serve` that concern its API and not its engine: `BaseFrontendArgs` of vllm.entrypoints.launchers
# .cli_args, named here so that workers can be started before vLLM is imported (a test holds the two equal).
FRONTEND_OPTIONS = frozenset(
    {
        "anthropic_disabled_thinking_effort",
        "chat_template",
        "chat_template_content_format",
        "cohere_format",
        "cohere_is_reasoning_model",
        "default_chat_template_kwargs",
        "enable_auto_tool_choice",
        "enable_force_include_usage",
        "enable_log_deltas",
        "enable_log_outputs",
        "enable_per_request_metrics",
        "enable_prompt_tokens_details",
        "enable_scale_out",
        "enable_server_load_tracking",
        "enable_tokenizer_info_endpoint",
        "exclude_tools_when_tool_choice_none",
        "fingerprint_mode",
        "fingerprint_value",
        "log_error_stack",
        "lora_modules",
        "max_log_len",
        "response_role",
        "return_tokens_as_token_ids",
        "sse_keep_alive_interval",
        "tokens_only",
        "tool_call_parser",
        "tool_parser_plugin",
        "tool_server",
        "tool_strict_level",
        "trust_request_chat_template",
        "trust_request_mm_kwargs",
    }
)
# What clients call the model is the API's alone, too.
NOT_OF_THE_ENGINE = FRONTEND_OPTIONS | {SERVED_MODEL_NAME}
# melld decides these itself; a configuration that names one is refused.
OURS = {
    "model": "[model] path",
    "host": "[server] host",
    "port": "[server] port",
    "api_key": "[server] api_key_file",
    "tensor_parallel_size": None,
    "pipeline_parallel_size": None,
    "data_parallel_size": None,
    "kv_transfer_config": None,
    "distributed_executor_backend": None,
    "speculative_config": None,
}


# vLLM's front end sends an image to its engine once and then only the image's hash.  Here any worker may be next, so
# every request brings its images along: what vLLM does by itself where several front ends share an engine.
IMAGES_TRAVEL_WHOLE = {"_api_process_count": 2}


def engine_arguments(config: Config, device_kind: str) -> dict[str, Any]:
    """The keyword arguments of `AsyncEngineArgs` for one worker on a device of this kind.

    Raises:
        ConfigError: `[model.vllm]` names something that melld decides.
    """
    own = {key.replace("-", "_"): value for key, value in config.model.vllm.items()}
    for key, instead in OURS.items():
        if key in own:
            raise ConfigError(f"[model.vllm] {key}", f"use {instead}" if instead else "not with melld")
    arguments: dict[str, Any] = {"distributed_executor_backend": "uni", "disable_log_stats": False}
    arguments |= IMAGES_TRAVEL_WHOLE
    if device_kind == "cpu":
        arguments |= CPU_ARGUMENTS
        arguments["kv_cache_memory_bytes"] = (config.devices.cpu or CpuDevices()).kv_cache_bytes
    else:
        # Until live migration has been seen to be exact with it on a GPU, a step is scheduled when the last one ended.
        arguments["async_scheduling"] = False
    return arguments | {key: value for key, value in own.items() if key not in NOT_OF_THE_ENGINE}


def async_engine_args(model_path: str, arguments: dict[str, Any]) -> "AsyncEngineArgs":
    """What vLLM makes its configuration from; `ConfigError` names an argument that vLLM lacks.  Imports vLLM."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    check_names(arguments, AsyncEngineArgs.__dataclass_fields__)
    return AsyncEngineArgs(model=model_path, **arguments)


def check_names(arguments: Iterable[str], known: Container[str]) -> None:
    """Raises `ConfigError` for an argument that vLLM lacks."""
    for key in arguments:
        if key not in known:
            raise ConfigError(f"[model.vllm] {key}", "vLLM has no such option")


def names_in_source() -> frozenset[str] | None:
    """The fields of `vllm.engine.arg_utils.AsyncEngineArgs`, read and not imported, which would take seconds.

    None where there is no vLLM.
    """
    if (found := importlib.util.find_spec("vllm")) is None or found.origin is None:
        return None
    module = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_bytes())
    names = ("EngineArgs", "AsyncEngineArgs")
    kinds = [one for one in module.body if isinstance(one, ast.ClassDef) and one.name in names]
    fields = [line.target for kind in kinds for line in kind.body if isinstance(line, ast.AnnAssign)]
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))
