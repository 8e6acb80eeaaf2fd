"""vLLM's input and output processors and its serving classes over the fleet, unchanged.

Owns the seam: `FleetClient` is an `EngineCoreClient` (vllm.v1.engine.core_client), so that `AsyncLLM` and everything
above it see one engine.  Runs in the daemon and never opens a CUDA context: only the workers touch a device.
"""

import asyncio
import contextlib
import copy
import json
import warnings
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.datastructures import State
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs, validate_parsed_serve_args
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams, check_json_nesting
from vllm.tasks import SupportedTask
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    logprobs,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from melld.config import SERVED_MODEL_NAME, Config
from melld.engine.arguments import async_engine_args, engine_config
from melld.engine.fleet.fleet import Failures, Fleet
from melld.engine.frontend.caller import caller
from melld.engine.frontend.judges import Judges
from melld.engine.frontend.prompt_logprobs import PromptLogprobs
from melld.engine.frontend.token_texts import TokenTexts
from melld.engine.frontend.turns import Turns
from melld.engine.host.template import TemplateProcess
from melld.engine.vllm_options import FRONTEND_OPTIONS
from melld.errors import MelldError

# vLLM copies each tensor out of its frame; torch warns because a frame is read-only.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

GENERATES: tuple[SupportedTask, ...] = ("generate",)


class _Resources:
    """The resources that `AsyncLLM` reads from its client: a fleet is never dead, as its workers restart."""

    engine_dead = False


class FleetClient(EngineCoreClient):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """The fleet, presented to `AsyncLLM` as one engine."""

    def __init__(
        self,
        fleet: Fleet,
        supported_tasks: tuple[str, ...],
        vocabulary: int,
        prompt_logprobs: PromptLogprobs,
        turns: Turns,
    ) -> None:
        self._fleet = fleet
        self._turns = turns
        self._supported_tasks = supported_tasks
        self._vocabulary = vocabulary
        self.resources = _Resources()
        self._prompt_logprobs = prompt_logprobs
        self.engine_ranks_managed = list(range(len(fleet.places)))

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the daemon stops the workers."""

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the model's tasks, as the workers reported them."""
        return self._supported_tasks

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Submit a request.

        Raises:
            RequestTooLarge: the request fits no worker.
            QueueFull: too many requests wait.
            TooManyPromptLogprobs, TooManyPromptLogprobsNow: see `Caller`.
        """
        called = caller()
        await self._turns.mine()  # before it is admitted: whoever is cancelled here has nothing to give back
        called.take_prompt_logprobs(self._count_prompt_logprobs(request))
        request.priority = called.priority
        self._fleet.admit(request, called.client)
        called.admitted.set()

    def _count_prompt_logprobs(self, request: EngineCoreRequest) -> int:
        """Count the logprobs of the prompt: for each token its own, and those of the most likely tokens."""
        params = request.sampling_params
        if params is None or params.prompt_logprobs is None:
            return 0
        most_likely = self._vocabulary if params.prompt_logprobs < 0 else params.prompt_logprobs
        return len(request.prompt_token_ids or ()) * (most_likely + 1)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort the requests at once."""
        self._fleet.abort(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the outputs of the next step of any worker."""
        return self._prompt_logprobs.sift(await self._fleet.outputs.get())

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset the cache on every worker; return True if all succeeded."""
        return all(await self._fleet.call_all("reset_prefix_cache", [reset_running_requests, reset_connector]))

    async def reset_mm_cache_async(self) -> None:
        """Reset the cache on every worker."""
        await self._fleet.call_all("reset_mm_cache")

    async def reset_encoder_cache_async(self) -> None:
        """Reset the cache on every worker."""
        await self._fleet.call_all("reset_encoder_cache")

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Load the adapter on every worker; one that starts later loads it before its first request with it."""
        return all(await self._fleet.call_all("add_lora", [lora_request]))

    async def is_sleeping_async(self) -> bool:
        """Return False: a request wakes a sleeping worker, so the fleet never sleeps as a whole."""
        return False

    async def is_scheduler_paused_async(self) -> bool:
        """Return False."""
        return False


class OutputsStopped(MelldError):
    """vLLM stopped reading outputs after an error and will not start again: no request would be answered."""

    def __init__(self) -> None:
        super().__init__("vLLM has stopped reading the workers' outputs: see its error in the log")


class Frontend(AsyncLLM):  # type: ignore[misc]
    """`AsyncLLM` over a fleet.  A refused request leaves nothing behind in its output processor.

    No client's constraint reaches a compiler in this process: `judges` check it, whichever field it came in, and
    `input_processor` takes the result as it is.
    """

    def __init__(
        self, judges: Judges, failures: Failures, turns: Turns, states: dict[str, Any], **arguments: Any
    ) -> None:
        """Keep the states of requests in `states`, by their names."""
        super().__init__(**arguments)
        self.output_processor.request_states = states
        self.judges = judges
        self._turns = turns
        self._failures = failures
        self.input_processor.structured_outputs_config = None
        # Of the log-probabilities of an answer, lists of numbers are kept: a million objects would stop the loop
        # whenever they are looked through for garbage.
        logprobs.create_sample_logprobs = lambda _flat: FlatLogprobs()
        backend_xgrammar.validate_xgrammar_grammar = _look_only

    async def add_request(self, request_id: str, prompt: Any, params: Any, *arguments: Any, **more: Any) -> Any:
        """See `AsyncLLM`.  The prompts of one call come in one after the other, the loop turning between two.

        Raises:
            ConstraintRefused: the output cannot be constrained as `params` say.
            PromptRepeatedTooOften: it is too long for so many choices.
        """
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            ruled = await self.judges.judge(msgspec.msgpack.encode(params.structured_outputs), caller().client)
            params = copy.copy(params)
            params.structured_outputs = msgspec.msgpack.decode(ruled, type=StructuredOutputsParams)
        if isinstance(prompt, dict) and isinstance(params, SamplingParams):
            caller().check_repeated(len(prompt.get("prompt_token_ids") or ()), params.n)
        async with caller().line:
            await self._turns.mine()
            return await super().add_request(request_id, prompt, params, *arguments, **more)

    async def _add_request(self, request: EngineCoreRequest, *arguments: Any) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self.output_processor.abort_requests, [request.request_id], internal=True)
            await super()._add_request(request, *arguments)
            undo.pop_all()

    async def learn_token_texts(self) -> None:
        """Make the logprobs' token texts come from a table, and fill the table with the whole vocabulary."""
        if self.tokenizer is not None:
            texts = logprobs.convert_ids_list_to_tokens
            if not isinstance(texts, TokenTexts):
                texts = logprobs.convert_ids_list_to_tokens = TokenTexts(convert_ids_list_to_tokens)
            await texts.fill(self.tokenizer, self.model_config.get_vocab_size())

    async def watch_outputs(self) -> None:
        """Wait while vLLM reads the workers' outputs.

        Raises:
            OutputsStopped: vLLM has stopped, after reporting the error in its log and to the calls in flight.
        """
        self._run_output_handler()
        assert self.output_handler is not None
        await asyncio.wait({self.output_handler})
        raise OutputsStopped

    async def fail_requests(self) -> None:
        """Raise each failed request's error where its outputs are read, without end."""
        while True:
            request, error = await self._failures.get()
            state = self.output_processor.request_states.get(request)
            if state is not None and state.queue is not None:
                state.queue.put(error)


def vllm_config_of(config: Config, engine_arguments: dict[str, Any]) -> VllmConfig:
    """Build the same configuration as the workers', from the same settings.  Slow: it reads the model's files."""
    named = engine_arguments | {SERVED_MODEL_NAME: list(config.model.names)}  # the label of vLLM's metrics
    return engine_config(async_engine_args(config.model.path, named))


def _look_only(sampling_params: SamplingParams) -> None:
    """Replace vLLM's validation, which would run a compiler on the event loop.

    vLLM calls it while it parses a request, and to ask if a constraint can be joined with that of tools.  To refuse is
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
        raise VLLMValidationError("the schema has features that xgrammar lacks")


def make_frontend(
    fleet: Fleet, template: TemplateProcess, vllm_config: VllmConfig, constraint_cpu_s: float
) -> Frontend:
    """Make the engine client for vLLM's serving classes.  Needs ready workers and a running event loop."""
    spec = next(iter(fleet.places.values())).slot.spec
    judges = Judges(template, spec, constraint_cpu_s)
    ready = next(iter(fleet.ready.values()))
    _sync(
        vllm_config,
        [msgspec.msgpack.decode(r.ready_response, type=EngineCoreReadyResponse) for r in fleet.ready.values()],
    )
    return frontend_over(fleet, tuple(ready.supported_tasks), judges, vllm_config)


def frontend_over(fleet: Fleet, tasks: tuple[str, ...], judges: Judges, vllm_config: VllmConfig) -> Frontend:
    """Join vLLM's processors and the fleet."""
    turns, states = Turns(), dict[str, Any]()
    prompt_logprobs = PromptLogprobs(states, fleet.outputs.put_nowait, turns)
    client = FleetClient(fleet, tasks, vllm_config.model_config.get_vocab_size(), prompt_logprobs, turns)
    with _client_made_by(client):
        return Frontend(
            judges,
            fleet.failures,
            turns,
            states,
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_stats=True,
            log_requests=False,
        )


async def rehearse_frontend(client: EngineCoreClient, vllm_config: VllmConfig, arguments: Namespace) -> None:
    """Build the front end over a dummy client and drop it, to raise vLLM's errors early."""
    tasks = GENERATES if vllm_config.model_config.runner_type == "generate" else ()
    with _client_made_by(client):
        frontend = AsyncLLM(
            vllm_config=vllm_config, executor_class=Executor.get_class(vllm_config), log_stats=False, log_requests=False
        )
    try:
        await init_app_state(frontend, State(), arguments, tasks)
    finally:
        frontend.shutdown()


@contextlib.contextmanager
def _client_made_by(client: EngineCoreClient) -> Iterator[None]:
    """Replace the client that `AsyncLLM` makes, through the static method that makes it."""
    made_by_vllm = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: client)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(made_by_vllm)


def _sync(vllm_config: VllmConfig, responses: list[EngineCoreReadyResponse]) -> None:
    """Apply what the workers settled at their start (vllm.v1.engine.core_client.MPClient._apply_ready_response)."""
    first = responses[0]
    vllm_config.model_config.max_model_len = min(response.max_model_len for response in responses)
    cache = vllm_config.cache_config
    cache.num_gpu_blocks = sum(response.num_gpu_blocks for response in responses)
    cache.block_size = first.block_size
    cache.mamba_block_size = first.mamba_block_size
    cache.effective_attention_block_size = first.effective_attention_block_size
    cache.kv_cache_size_tokens = first.kv_cache_size_tokens
    cache.kv_cache_max_concurrency = first.kv_cache_max_concurrency


def serving_arguments(config: Config, engine_arguments: dict[str, Any]) -> Namespace:
    """Return the namespace that `vllm serve` would have for its API, or raise vLLM's error for a bad value."""
    options = {key.replace("-", "_"): value for key, value in config.model.vllm.items()}
    ours = {key: value for key, value in options.items() if key in FRONTEND_OPTIONS}
    arguments = Namespace(**vars(FrontendArgs()) | vars(async_engine_args(config.model.path, engine_arguments)) | ours)
    arguments.served_model_name = list(config.model.names)
    arguments.lora_modules = [LoRAModulePath(name=one.name, path=one.path) for one in config.model.lora] or None
    arguments.enable_flash_late_interaction = False  # a query's vectors would be on one worker, its documents anywhere
    validate_parsed_serve_args(arguments)
    return arguments


async def serving_state(frontend: Frontend, arguments: Namespace) -> State:
    """Make vLLM's serving classes: `openai_serving_chat`, `_completion`, `anthropic_serving_messages`, ..."""
    state = State()
    await init_app_state(frontend, state, arguments, await frontend.get_supported_tasks())
    return state
