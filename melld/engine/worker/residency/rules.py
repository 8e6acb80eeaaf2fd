"""Preconditions: what can move and what can run here, and LoRA adapters.

Owns the refusals.  Changes nothing but the adapters that are loaded.
"""

import hashlib
import logging
from typing import TYPE_CHECKING, Any

from melld.engine.layers import name_of, specs_in
from melld.engine.pin import VLLM_VERSION
from melld.engine.worker.residency.states import can_copy_states
from melld.kvstore.kept import are_known, uncopied
from melld.migrate.snapshot import MoveRefusal, Via

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


def engine_refusal(scheduler: "Scheduler") -> MoveRefusal | None:
    """Return why no request can come to this engine from another, or None."""
    if scheduler.connector is not None or scheduler.ec_connector is not None:
        return MoveRefusal.KV_CONNECTOR
    if scheduler.aux_output_connector is not None:
        return MoveRefusal.AUXILIARY_OUTPUT
    return None


def leave_refusal(scheduler: "Scheduler") -> MoveRefusal | None:
    """Return why no running request can leave this engine, or None; after a crash they still resume elsewhere."""
    if scheduler.num_prefill_lookahead > 1:
        return MoveRefusal.SPECULATIVE
    return engine_refusal(scheduler) or (None if are_known(_kinds_of(scheduler)) else MoveRefusal.UNTRIED_KV)


def kv_refusal(scheduler: "Scheduler") -> MoveRefusal | None:
    """Return why this engine's KV blocks cannot be copied (some may not hold everything), or None."""
    if not can_copy_states(scheduler):
        return MoveRefusal.STATES
    return MoveRefusal.KV_LAYOUT if uncopied(_kinds_of(scheduler)) or scheduler.dcp_world_size > 1 else None


def _kinds_of(scheduler: "Scheduler") -> set[str]:
    return {name_of(spec) for spec in specs_in(scheduler.kv_cache_config.kv_cache_groups)}


def request_refusal(request: "Request", via: Via) -> MoveRefusal | None:
    """Return why this request cannot move from any engine, or None."""
    from vllm.v1.request import RequestStatus

    if request.pooling_params is not None or request.sampling_params is None:
        return MoveRefusal.POOLING
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return MoveRefusal.PROMPT_EMBEDDINGS
    if request.resumable or request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
        return MoveRefusal.STREAMING_INPUT
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return MoveRefusal.KV_CONNECTOR
    half_collected = 0 < request.num_computed_tokens < request.num_prompt_tokens
    if via is Via.KV and request.sampling_params.prompt_logprobs is not None and half_collected:
        return MoveRefusal.PROMPT_LOGPROBS
    return None


def engine_name(engine: "EngineCore") -> str:
    """Return a digest of everything that must match on two workers for a request's KV to be valid on both."""
    config = engine.vllm_config
    scheduler: Any = engine.scheduler
    words: tuple[Any, ...] = (
        VLLM_VERSION,
        config.model_config.model,
        config.model_config.revision,
        config.model_config.dtype,
        config.model_config.max_model_len,
        config.model_config.quantization,
        config.cache_config.cache_dtype,
        config.cache_config.mamba_cache_dtype,
        config.cache_config.mamba_ssm_cache_dtype,
        config.cache_config.mamba_cache_mode,
        str(getattr(config.cache_config, "kv_cache_layout", "")),
        config.device_config.device_type,
        config.parallel_config.tensor_parallel_size,
        _drafting(config.speculative_config),
        config.lora_config is not None,
        scheduler.use_v2_model_runner,
        scheduler.kv_cache_manager.coordinator.group_block_sizes,
    )
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def _drafting(speculative: Any) -> tuple[Any, ...]:
    """Return the drafter that keeps its KV in the model's blocks."""
    if speculative is None:
        return ()
    return speculative.method, speculative.model, speculative.revision, speculative.num_speculative_tokens


def adapter_refusal(engine: "EngineCore", request: Any) -> MoveRefusal | None:
    """Load the request's adapter if it is not loaded yet; return why the request cannot run here, or None.

    For the engine thread, between two steps, before the scheduler has the request: a step that fails ends the worker.
    `request`: vLLM's `Request` or `EngineCoreRequest`.
    """
    wanted = request.lora_request
    if wanted is None:
        return None
    if engine.vllm_config.lora_config is None:
        return MoveRefusal.LORA_ABSENT
    if wanted.lora_int_id in engine.list_loras():
        return None
    if (why := load_adapter(engine, wanted)) is not None:
        log.warning("cannot load adapter %s from %s: %s", wanted.lora_name, wanted.lora_path, why)
        return MoveRefusal.LORA_ABSENT
    return None


def load_adapter(engine: "EngineCore", adapter: "LoRARequest") -> str | None:
    """Load the adapter; return why it cannot be, or None."""
    try:
        engine.add_lora(adapter)
    except Exception as error:  # noqa: BLE001  whatever is wrong with its files, only its requests fail
        return str(error)
    return None
