"""Front ends with vLLM's serving classes, made in a thread before a worker is ready.

Owns how they are made, and what is left to do on the loop once a worker is ready.

    front_of (slow) ──► Prepared ──► fit: what the workers have found out; adapters are loaded ──► Frontend.connect
"""

import asyncio
import gc
from argparse import Namespace
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import State
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs, validate_parsed_serve_args
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.v1.engine import EngineCoreReadyResponse

from melld.config import Config
from melld.engine.arguments import async_engine_args
from melld.engine.fleet.fleet import Fleet
from melld.engine.frontend.frontend import Frontend
from melld.engine.frontend.vllm_metrics import register_no_tool_calls
from melld.engine.model_files import answer_formats
from melld.engine.vllm_options import frontend_options

NEW_OBJECTS = 50_000
"""Garbage collection threshold, 1 to 2 ms each: a call creates thousands of objects, nearly all freed without it."""


class Prepared(NamedTuple):
    """A front end that vLLM has accepted the settings of, to be connected once a worker is ready."""

    frontend: Frontend
    arguments: Namespace
    serving: State
    """vLLM's serving classes: `openai_serving_chat`, `_completion`, `anthropic_serving_messages`, ..."""
    tasks: tuple[str, ...]
    max_model_len: int


def front_of(vllm_config: VllmConfig, arguments: Namespace, tasks: tuple[str, ...]) -> Prepared:
    """Build a front end for these tasks.  Slow: to be called in a thread."""
    frontend = Frontend(vllm_config)
    try:
        return _serving(frontend, arguments, tasks)
    except BaseException:
        frontend.shutdown()
        raise


def _serving(frontend: Frontend, arguments: Namespace, tasks: tuple[str, ...]) -> Prepared:
    """Create vLLM's serving classes.  No worker is asked."""
    register_no_tool_calls()
    serving = State()
    asyncio.run(init_app_state(frontend, serving, arguments, tasks))
    return Prepared(frontend, arguments, serving, tasks, frontend.model_config.max_model_len)


async def fit(prepared: Prepared, fleet: Fleet) -> Prepared:
    """Return it with what the workers have found out, one of which has been ready, and have them load its adapters.

    Raises:
        RuntimeError: a worker cannot load an adapter.
    """
    assert fleet.last_ready is not None
    ready = list(fleet.ready.values()) or [fleet.last_ready]
    responses = [msgspec.msgpack.decode(one.ready_response, type=EngineCoreReadyResponse) for one in ready]
    _sync(prepared.frontend.vllm_config, responses)
    tasks, max_model_len = tuple(ready[0].supported_tasks), prepared.frontend.model_config.max_model_len
    if (tasks, max_model_len) != (prepared.tasks, prepared.max_model_len):
        prepared = await asyncio.to_thread(_serving, prepared.frontend, prepared.arguments, tasks)
    for adapter in prepared.serving.openai_serving_models.lora_requests.values():
        await fleet.load_adapter(adapter)
    return prepared


def _sync(vllm_config: VllmConfig, responses: list[EngineCoreReadyResponse]) -> None:
    """Apply what workers determined at startup (vllm.v1.engine.core_client.MPClient._apply_ready_response)."""
    first = responses[0]
    vllm_config.model_config.max_model_len = min(response.max_model_len for response in responses)
    cache = vllm_config.cache_config
    cache.num_gpu_blocks = sum(response.num_gpu_blocks for response in responses)
    cache.block_size = first.block_size
    cache.mamba_block_size = first.mamba_block_size
    cache.effective_attention_block_size = first.effective_attention_block_size
    cache.kv_cache_size_tokens = first.kv_cache_size_tokens
    cache.kv_cache_max_concurrency = first.kv_cache_max_concurrency


def serving_arguments(config: Config, engine_arguments: dict[str, Any], vllm_config: VllmConfig) -> Namespace:
    """Return the namespace that `vllm serve` would use for its API, or raise vLLM's error for a bad value."""
    options = {"enable_prompt_tokens_details": True}  # usage of both OpenAI and Anthropic includes cached tokens
    options |= {key.replace("-", "_"): value for key, value in config.model.vllm.items()}
    formats = answer_formats(config.model)
    options |= formats.options
    ours = {key: value for key, value in options.items() if key in frontend_options()}
    arguments = Namespace(**vars(FrontendArgs()) | vars(async_engine_args(config.model.path, engine_arguments)) | ours)
    arguments.served_model_name = list(config.model.names)
    # vLLM's serving classes look for the reasoning parser here: the configured one, or the model's own.
    arguments.structured_outputs_config = vllm_config.structured_outputs_config
    arguments.lora_modules = [LoRAModulePath(name=one.name, path=one.path) for one in config.model.lora] or None
    arguments.enable_flash_late_interaction = False  # a query's vectors would be on one worker, its documents' on any
    arguments.no_tools_because = formats.no_tools_because
    validate_parsed_serve_args(arguments)
    return arguments


def leave_to_collect() -> None:
    """Keep the garbage collector from all that there is: each full collection would stall the loop otherwise."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


TASK_WORDS = {"generate": "completion", "embed": "embedding", "classify": "classification"}
MODALITY_WORDS = {"image": "vision"}


def capabilities_of(prepared: Prepared) -> tuple[str, ...]:
    """Return the model's capabilities, as Ollama names them: `completion`, `vision`, `tools`, ..."""
    tasks = [one for one in prepared.tasks if not one.startswith("token_")]
    processor = prepared.frontend.renderer.mm_processor
    modalities = () if processor is None else processor.info.allowed_mm_limits
    words = [TASK_WORDS.get(one, one) for one in tasks] + [MODALITY_WORDS.get(one, one) for one in modalities]
    words += ["tools"] * (prepared.arguments.tool_call_parser is not None)
    words += ["thinking"] * bool(prepared.arguments.structured_outputs_config.reasoning_parser)
    return tuple(dict.fromkeys(words))
