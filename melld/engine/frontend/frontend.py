"""vLLM's input and output processors and its serving classes over the fleet, unchanged.

Owns what `AsyncLLM` does differently over a fleet, and how it and the serving classes are created.  Runs in the daemon
and never opens a CUDA context: only workers touch a device.
"""

import asyncio
import contextlib
import copy
import functools
import gc
import json
import warnings
from argparse import Namespace
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.datastructures import State
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs, validate_parsed_serve_args
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.envs import enable_envs_cache
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams, check_json_nesting
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreReadyResponse, EngineCoreRequest, logprobs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from melld.config import SERVED_MODEL_NAME, Config
from melld.engine.arguments import async_engine_args, engine_config
from melld.engine.fleet.fleet import Fleet
from melld.engine.fleet.requests import Failures
from melld.engine.frontend.caller import caller
from melld.engine.frontend.fleet_client import FleetClient, client_made_by
from melld.engine.frontend.judges import Judges
from melld.engine.frontend.masks import Masks
from melld.engine.frontend.plain_outputs import before_vllm, gather, take_plain
from melld.engine.frontend.prompt_logprobs import PromptLogprobs
from melld.engine.frontend.step_logger import StepLogger, step_taker
from melld.engine.frontend.token_texts import TokenTexts
from melld.engine.frontend.turns import Turns
from melld.engine.host.template import TemplateProcess
from melld.engine.model_files import answer_formats
from melld.engine.vllm_options import frontend_options
from melld.errors import MelldError

# vLLM copies each tensor out of its frame, but torch warns because the frame is read-only.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)


NEW_OBJECTS = 10_000
"""Garbage collection threshold: a call creates thousands of objects, nearly all of which are freed without it."""


class OutputsStopped(MelldError):
    """vLLM stopped reading outputs after an error."""

    def __init__(self) -> None:
        super().__init__("vLLM stopped reading the workers' outputs: see its error in the log")


class Frontend(AsyncLLM):  # type: ignore[misc]
    """`AsyncLLM` over a fleet.  A refused request leaves nothing behind in its output processor.

    No client's constraint reaches a compiler in this process: `judges` check it, whichever field it came in, and
    `input_processor` accepts the result without a check.
    """

    output_handler: asyncio.Task[None] | None

    def __init__(
        self, judges: Judges, failures: Failures, turns: Turns, states: dict[str, Any], **arguments: Any
    ) -> None:
        """Track the states of requests in `states`, by request id."""
        super().__init__(**arguments)
        self.output_processor.request_states = states
        self.output_processor.process_outputs = before_vllm(states, self.output_processor.process_outputs)
        self.engine_core.take_step = step_taker(states, self.logger_manager.stat_loggers)
        self.engine_core.take_plain = functools.partial(take_plain, states)
        self.judges = judges
        self._turns = turns
        self._failures = failures
        self.input_processor.structured_outputs_config = None
        # Logprobs of an answer are kept as lists of numbers: as a million objects they would stall the loop at every
        # garbage collection.
        logprobs.create_sample_logprobs = lambda _flat: FlatLogprobs()
        if not isinstance(logprobs.convert_ids_list_to_tokens, TokenTexts):
            logprobs.convert_ids_list_to_tokens = TokenTexts(convert_ids_list_to_tokens)
        backend_xgrammar.validate_xgrammar_grammar = _look_only
        enable_envs_cache()  # vLLM looks some of them up for each token

    async def add_request(self, request_id: str, prompt: Any, params: Any, *arguments: Any, **more: Any) -> Any:
        """See `AsyncLLM`.  The prompts of one call are admitted one by one, and the loop runs in between.

        Raises:
            ConstraintRefused: the output cannot be constrained as `params` say.
            PromptRepeatedTooOften: the prompt is too long for that many choices.
        """
        ruled = None
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            await self._turns.mine()
            ruled = await self.judges.judge(msgspec.msgpack.encode(params.structured_outputs), caller().client)
        if isinstance(prompt, dict) and isinstance(params, SamplingParams):
            caller().check_repeated(len(prompt.get("prompt_token_ids") or ()), params.n)
        async with caller().line:
            await self._turns.mine()
            if ruled is not None:
                params = copy.copy(params)
                params.structured_outputs = msgspec.msgpack.decode(ruled, type=StructuredOutputsParams)
            queue = await super().add_request(request_id, prompt, params, *arguments, **more)
        if (outlet := caller().outlet) is not None:
            outlet.opened(queue, self.output_processor.request_states.get(queue.request_id))
        return queue

    def generate(self, *arguments: Any, **named: Any) -> AsyncGenerator[Any, None]:
        """See `AsyncLLM`.  Output that the call's outlet has already sent is yielded later, in one piece.

        Each output is handled in a loop iteration that has time for it, as all outputs of a step come at once.
        """
        outputs, outlet = super().generate(*arguments, **named), caller().outlet
        return self._in_turns(outputs) if outlet is None else outlet.through(outputs, self._turns.mine)

    async def _in_turns(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                await self._turns.mine()
                yield output

    async def _add_request(self, request: EngineCoreRequest, *arguments: Any) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self.output_processor.abort_requests, [request.request_id], internal=True)
            await super()._add_request(request, *arguments)
            undo.pop_all()
        if (state := self.output_processor.request_states.get(request.request_id)) is not None:
            gather(state)

    async def learn_token_texts(self) -> None:
        """Fill the table of the tokens' texts, which logprobs show, with the whole vocabulary."""
        if self.tokenizer is not None:
            texts: TokenTexts = logprobs.convert_ids_list_to_tokens
            await texts.fill(self.tokenizer, self.model_config.get_vocab_size())

    async def watch_outputs(self) -> None:
        """Make vLLM read the workers' outputs, restarting it if it has stopped, and wait as long as it does.

        Raises:
            OutputsStopped: vLLM has stopped.  It has reported the error in its log and to the calls in flight, which
                end: some of their outputs may be lost.
        """
        if self.output_handler is not None and self.output_handler.done():
            self.output_handler = None
        self._run_output_handler()
        assert self.output_handler is not None
        try:
            await asyncio.wait({self.output_handler})
        finally:
            self.output_handler.cancel()
        raise OutputsStopped

    async def fail_requests(self) -> None:
        """Raise each failed request's error where its outputs are read; never return."""
        while True:
            request, error = await self._failures.get()
            state = self.output_processor.request_states.get(request)
            if state is not None and state.queue is not None:
                state.queue.put(error)


def vllm_config_of(config: Config, engine_arguments: dict[str, Any]) -> VllmConfig:
    """Build the same configuration as the workers do, from the same settings.  Slow: it reads the model's files."""
    named = engine_arguments | {SERVED_MODEL_NAME: list(config.model.names)}  # the label of vLLM's metrics
    return engine_config(async_engine_args(config.model.path, named))


def _look_only(sampling_params: SamplingParams) -> None:
    """Replace vLLM's validation, which would run a compiler on the event loop.

    vLLM calls it when parsing a request, and to ask if a constraint can be combined with that of tools.  Refusing is
    always safe: the constraint then stands alone.
    """
    params = sampling_params.structured_outputs
    if params is None:
        return
    if params.grammar is not None and grammar_is_likely_lark(params.grammar):
        raise VLLMValidationError("a Lark grammar cannot be combined with tools")
    check_json_nesting(params.json)
    schema = json.loads(params.json) if isinstance(params.json, str) else params.json
    if isinstance(schema, dict) and backend_xgrammar.has_xgrammar_unsupported_json_features(schema):
        raise VLLMValidationError("the schema uses features that xgrammar does not support")


def make_frontend(
    fleet: Fleet, template: TemplateProcess, vllm_config: VllmConfig, constraint_cpu_s: float
) -> Frontend:
    """Create the engine client for vLLM's serving classes on the running loop.  Call it after a worker was ready."""
    spec = next(iter(fleet.places.values())).slot.spec
    judges = Judges(template, spec, constraint_cpu_s)
    assert fleet.last_ready is not None
    ready = list(fleet.ready.values()) or [fleet.last_ready]
    _sync(vllm_config, [msgspec.msgpack.decode(one.ready_response, type=EngineCoreReadyResponse) for one in ready])
    return frontend_over(fleet, tuple(ready[0].supported_tasks), judges, vllm_config)


def frontend_over(fleet: Fleet, tasks: tuple[str, ...], judges: Judges, vllm_config: VllmConfig) -> Frontend:
    """Connect vLLM's processors to the fleet."""
    turns, states = Turns(), dict[str, Any]()
    prompt_logprobs = PromptLogprobs(states, fleet.outputs.put_nowait, turns)
    vocabulary = vllm_config.model_config.get_vocab_size()
    masks = Masks(states, vocabulary)
    client = FleetClient(fleet, tasks, vocabulary, prompt_logprobs, masks, turns)
    with client_made_by(client):
        return Frontend(
            judges,
            fleet.requests.failures,
            turns,
            states,
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            stat_loggers=[StepLogger],
            log_stats=True,
            log_requests=False,
        )


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


async def serving_state(frontend: Frontend, arguments: Namespace) -> State:
    """Create vLLM's serving classes: `openai_serving_chat`, `_completion`, `anthropic_serving_messages`, ..."""
    state = State()
    await init_app_state(frontend, state, arguments, await frontend.get_supported_tasks())
    gc.freeze()  # as vLLM does: otherwise each full collection would stall the loop, scanning all its modules
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
    return state


TASK_WORDS = {"generate": "completion", "embed": "embedding", "classify": "classification"}
MODALITY_WORDS = {"image": "vision"}


async def capabilities_of(frontend: Frontend, arguments: Namespace) -> tuple[str, ...]:
    """Return the model's capabilities, as Ollama names them: `completion`, `vision`, `tools`, ..."""
    tasks = [one for one in await frontend.get_supported_tasks() if not one.startswith("token_")]
    processor = frontend.renderer.mm_processor
    modalities = () if processor is None else processor.info.allowed_mm_limits
    words = [TASK_WORDS.get(one, one) for one in tasks] + [MODALITY_WORDS.get(one, one) for one in modalities]
    words += ["tools"] * (arguments.tool_call_parser is not None)
    words += ["thinking"] * bool(arguments.structured_outputs_config.reasoning_parser)
    return tuple(dict.fromkeys(words))
