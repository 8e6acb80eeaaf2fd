"""Every option of `vllm serve`, as supported or refused with a reason.

Names only, so that a configuration can be checked before vLLM is imported.  A test compares them with the parser of the
pinned vLLM: an option of a new version must be decided here first.
"""

import re
from collections.abc import Mapping
from typing import Any

from melld.errors import ConfigError
from melld.nearest import did_you_mean

# Options of vLLM's API (`BaseFrontendArgs` of vllm.entrypoints.launchers.cli_args, and the model's names): its serving
# classes carry them out.
_FRONTEND_TEXT = """
anthropic_disabled_thinking_effort chat_template chat_template_content_format cohere_format
default_chat_template_kwargs enable_auto_tool_choice enable_force_include_usage enable_per_request_metrics
enable_prompt_tokens_details exclude_tools_when_tool_choice_none fingerprint_mode fingerprint_value response_role
return_tokens_as_token_ids served_model_name tool_call_parser tool_parser_plugin tool_server tool_strict_level
trust_request_chat_template trust_request_mm_kwargs
"""
# Options of vLLM's engine (`AsyncEngineArgs` of vllm.engine.arg_utils): workers and the daemon's processors get them.
_ENGINE_TEXT = """
additional_config all2all_backend allow_deprecated_quantization allowed_local_media_path allowed_media_domains
async_scheduling attention_backend attention_config aux_output_config block_size code_revision collect_detailed_traces
compilation_config config_format convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb
cpu_offload_params cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets dbo_decode_token_threshold
dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate diffusion_config
disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
disable_nccl_for_dp_synchronization disable_sliding_window distributed_timeout_seconds download_dir dp_sync_interval
dtype ec_manager_config enable_batch_sharded_sampling enable_chunked_prefill enable_dbo enable_ep_weight_filter
enable_eplb enable_expert_parallel enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding
enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend enable_prefix_caching enable_prompt_embeds
enable_return_routed_experts enable_tower_connector_lora enable_trace_replay enforce_eager engram_config eplb_config
expert_placement_strategy fail_on_environ_validation fully_sharded_loras gdn_prefill_backend generation_config
gpu_memory_utilization hf_config_path hf_overrides hf_token ignore_patterns interleave_mm_strings ir_op_priority
jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype
kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample kv_sharing_fast_prefill
language_model_only limit_mm_per_prompt linear_backend load_format logits_processors logprobs_mode
long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype lora_target_modules mamba_backend
mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype
mamba_ssu_algorithm max_cpu_loras max_cudagraph_capture_size max_logprobs max_lora_cls_labels max_lora_rank max_loras
max_model_len max_num_active_seqs max_num_batched_tokens max_num_scheduled_tokens max_num_seqs media_io_kwargs
mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
mm_shm_cache_max_object_size_mb mm_tensor_ipc model_class_overrides model_impl model_loader_extra_config model_weights
moe_backend num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size
offload_num_in_group offload_params offload_prefetch_step optimization_level otlp_traces_endpoint
override_generation_config performance_mode pooler_config prefill_schedule_interval prefix_cache_retention_interval
prefix_caching_hash_algo prefix_match_unit pt_load_map_location quantization quantization_config reasoning_config
reasoning_parser reasoning_parser_plugin renderer_num_workers replayssm_buffer_len return_sampling_mask revision runner
safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_reserve_full_isl
scheduling_policy seed show_hidden_metrics_for_version skip_mm_profiling skip_tokenizer_init sparse_indexer_topk_backend
spec_method spec_model spec_tokens specialize_active_lora speculative_config stream_interval structured_outputs_config
swa_bounded_replay tokenizer tokenizer_mode tokenizer_revision trust_remote_code ubatch_size use_fp64_gumbel
use_replayssm use_tqdm_on_load video_pruning_method video_pruning_rate watermark watermark_config worker_cls
worker_extension_cls
"""
FRONTEND_OPTIONS = frozenset(_FRONTEND_TEXT.split())
ENGINE_OPTIONS = frozenset(_ENGINE_TEXT.split())
_REASONS = {
    "use [model] path": "model model_tag",
    "use [server] host": "host",
    "use [server] port": "port",
    "use [server] host and port, or hand the daemon a socket": "uds",
    "use [server] api_key_file": "api_key",
    "use [server] drain_s": "shutdown_timeout",
    "use [server] keep_alive_comment_s": "sse_keep_alive_interval",
    "use [server] max_queued_requests and queue_deadline_s": "max_num_queued_reqs max_num_queued_tokens",
    "use [server] max_header_bytes and max_headers": "h11_max_incomplete_event_size h11_max_header_count",
    "use [devices]": "device_ids",
    "melld's configuration is one TOML file": "config",
    "melld speaks plain HTTP: put a TLS proxy before it": (
        "ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers"
    ),
    "melld lets no other web page call it": "allow_credentials allowed_origins allowed_methods allowed_headers",
    "melld has an HTTP server of its own": (
        "root_path middleware disable_fastapi_docs enable_offline_docs uvicorn_log_level grpc grpc_port headless "
        "api_server_count"
    ),
    "every answer carries x-request-id already": "enable_request_id_headers",
    "melld writes no access log": "disable_uvicorn_access_log disable_access_log_for_endpoints",
    "melld never logs prompts or answers": "enable_log_requests enable_log_outputs enable_log_deltas max_log_len",
    "melld writes its own log: use --log-level": ("log_error_stack log_level log_config_file logging_config"),
    "melld's metrics are made of them": "disable_log_stats aggregate_engine_logging",
    "use the metric melld_http_calls_in_flight": "enable_server_load_tracking",
    "use /tokenize and /detokenize": "enable_tokenizer_info_endpoint",
    "its endpoints are not served": (
        "tokens_only enable_scale_out cohere_is_reasoning_model weight_transfer_config profiler_config"
    ),
    "melld loads no plugin for /pooling": "io_processor_plugin",
    "a query's vectors would be on one worker, its documents on others": "enable_flash_late_interaction",
    "[devices] per_worker says how many devices make a worker": (
        "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "nnodes node_rank master_addr master_port enable_shm_tensor_arena"
    ),
    "melld starts a worker's processes itself: use [devices] per_worker": (
        "distributed_executor_backend ray_workers_use_nsight max_parallel_loading_workers"
    ),
    "each worker is a replica of the model: name more [devices]": (
        "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_start_rank "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_supervisor_port "
        "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold "
        "enable_elastic_ep elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config"
    ),
    "melld moves KV blocks itself": (
        "kv_transfer_config ec_transfer_config kv_events_config kv_offloading_backend kv_offloading_size"
    ),
    "the counts of a request would not move with it": "per_request_spec_decode_metrics",
    "melld moves requests through vLLM's own scheduler": "scheduler_cls",
    "melld puts workers to sleep itself: use [idle]": (
        "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator"
    ),
    "use [[model.lora]], each with name and path": "lora_modules default_mm_loras",
    "vLLM sets it itself": "_api_process_count _api_process_rank",
}
REFUSED_OPTIONS = {name: reason for reason, names in _REASONS.items() for name in names.split()}


def check_option(name: str) -> None:
    """Raise `ConfigError` for an option that melld does not support or that vLLM lacks."""
    if name in REFUSED_OPTIONS:
        raise ConfigError(f"[model.vllm] {name}", REFUSED_OPTIONS[name])
    known = FRONTEND_OPTIONS | ENGINE_OPTIONS
    if name not in known:
        raise ConfigError(f"[model.vllm] {name}", f"vLLM has no such option{did_you_mean(name, known)}")


def option_behind(reason: str, options: Mapping[str, Any]) -> str | None:
    """Return the given option that a worker's failure to start names, or whose value it names."""
    plain = {key.replace("-", "_"): value for key, value in options.items()}
    if (named := named_option(reason, plain)) is not None:
        return named
    words = re.findall(r"\w+", reason.lower())
    return next((key for key, value in plain.items() if isinstance(value, str) and value.lower() in words), None)


def named_option(words: str, options: Mapping[str, Any]) -> str | None:
    """Return the given option that `words` names first."""
    plain = re.sub(r"\W", "_", words.lower())
    named = [(plain.index(key), -len(key), key) for key in options if key in plain]
    return min(named)[2] if named else None
