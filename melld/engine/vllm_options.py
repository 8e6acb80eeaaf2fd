"""Options of `vllm serve` that melld rejects, each with a reason; the others are passed on to vLLM.

Importing vLLM takes seconds, so option names and types are read from its source, and a configuration is checked
before the import.  A test lists the options of the pinned version: a new one must be added there or rejected here.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from melld.errors import ConfigError
from melld.nearest import did_you_mean

Source = tuple[str, tuple[str, ...]]
"""A vLLM source file and the option classes in it."""
ENGINE_SOURCE: Source = ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))
FRONTEND_SOURCE: Source = ("entrypoints/launchers/cli_args.py", ("BaseFrontendArgs", "FrontendArgs"))

_REASONS = {
    "use [model] path": "model model_tag",
    "use [server] host": "host",
    "use [server] port": "port",
    "use [server] host and port, or pass the daemon a socket": "uds",
    "use [server] api_key_file": "api_key",
    "use [server] drain_s": "shutdown_timeout",
    "use [server] keep_alive_comment_s": "sse_keep_alive_interval",
    "use [server] max_queued_requests and queue_deadline_s": "max_num_queued_reqs max_num_queued_tokens",
    "use [server] max_header_bytes and max_headers": "h11_max_incomplete_event_size h11_max_header_count",
    "use [devices]": "device_ids",
    "melld is configured by one TOML file": "config",
    "melld speaks plain HTTP: put a TLS proxy in front of it": (
        "ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers"
    ),
    "use the [server] keys or the flags of the same names": (
        "allow_credentials allowed_origins allowed_methods allowed_headers"
    ),
    "melld has its own HTTP server": (
        "root_path middleware disable_fastapi_docs enable_offline_docs uvicorn_log_level grpc grpc_port headless "
        "api_server_count"
    ),
    "every response already has x-request-id": "enable_request_id_headers",
    "melld writes no access log": "disable_uvicorn_access_log disable_access_log_for_endpoints",
    "melld never logs prompts or outputs": "enable_log_requests enable_log_outputs enable_log_deltas max_log_len",
    "melld writes its own log: use --log-level": ("log_error_stack log_level log_config_file logging_config"),
    "melld's metrics are built from these": "disable_log_stats aggregate_engine_logging",
    "use the metric melld_http_calls_in_flight": "enable_server_load_tracking",
    "use /tokenize and /detokenize": "enable_tokenizer_info_endpoint",
    "melld does not serve its endpoints": (
        "tokens_only enable_scale_out cohere_is_reasoning_model weight_transfer_config profiler_config"
    ),
    "melld does not load plugins for /pooling": "io_processor_plugin",
    "a query's vectors and its documents would be on different workers": "enable_flash_late_interaction",
    "use [devices] per_worker": (
        "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "nnodes node_rank master_addr master_port enable_shm_tensor_arena"
    ),
    "melld starts a worker's processes itself: use [devices] per_worker": (
        "distributed_executor_backend ray_workers_use_nsight max_parallel_loading_workers"
    ),
    "each worker is a replica of the model: list more [devices]": (
        "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_start_rank "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_supervisor_port "
        "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold "
        "enable_elastic_ep elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config"
    ),
    "melld moves KV blocks itself": (
        "kv_transfer_config ec_transfer_config kv_events_config kv_offloading_backend kv_offloading_size"
    ),
    "a request's counts would not move with it": "per_request_spec_decode_metrics",
    "melld moves requests through vLLM's own scheduler": "scheduler_cls",
    "melld puts workers to sleep itself: use [idle]": (
        "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator"
    ),
    "use [[model.lora]], each with name and path": "lora_modules default_mm_loras",
    "vLLM sets it itself": "_api_process_count _api_process_rank",
}
REFUSED_OPTIONS = {name: reason for reason, names in _REASONS.items() for name in names.split()}


@functools.cache
def option_kinds(sources: tuple[Source, ...] = (ENGINE_SOURCE, FRONTEND_SOURCE)) -> Mapping[str, str]:
    """Return each option's annotation, such as `int | None`, by name; empty if vLLM is not installed."""
    if (found := importlib.util.find_spec("vllm")) is None or found.origin is None:
        return {}
    kinds: dict[str, str] = {}
    for file, names in sources:
        module = ast.parse((Path(found.origin).parent / file).read_bytes())
        for kind in module.body:
            if isinstance(kind, ast.ClassDef) and kind.name in names:
                fields = (line for line in kind.body if isinstance(line, ast.AnnAssign))
                kinds |= {f.target.id: ast.unparse(f.annotation) for f in fields if isinstance(f.target, ast.Name)}
    return {name: annotation for name, annotation in kinds.items() if not name.startswith("_")}


@functools.cache
def served_options() -> frozenset[str]:
    """Return the options passed on to vLLM; none if it is not installed."""
    return frozenset(option_kinds()) - REFUSED_OPTIONS.keys()


@functools.cache
def frontend_options() -> frozenset[str]:
    """Return the options that vLLM's serving classes handle; workers get the others."""
    return (frozenset(option_kinds((FRONTEND_SOURCE,))) | {"served_model_name"}) & served_options()


def check_option(name: str) -> None:
    """Raise `ConfigError` for an option that melld rejects or vLLM does not have."""
    if name in REFUSED_OPTIONS:
        raise ConfigError(f"[model.vllm] {name}", REFUSED_OPTIONS[name])
    known = served_options()
    if known and name not in known:
        raise ConfigError(f"[model.vllm] {name}", f"vLLM has no such option{did_you_mean(name, known)}")


def option_behind(reason: str, options: Mapping[str, Any]) -> str | None:
    """Return the option that a worker's startup failure mentions by name or by value."""
    plain = {key.replace("-", "_"): value for key, value in options.items()}
    if (named := named_option(reason, plain)) is not None:
        return named
    words = re.findall(r"\w+", reason.lower())
    return next((key for key, value in plain.items() if isinstance(value, str) and value.lower() in words), None)


def named_option(words: str, options: Mapping[str, Any]) -> str | None:
    """Return the option that `words` mentions first."""
    plain = re.sub(r"\W", "_", words.lower())
    named = [(plain.index(key), -len(key), key) for key in options if key in plain]
    return min(named)[2] if named else None
