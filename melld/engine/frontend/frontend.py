"""vLLM's input and output processors and its serving classes over the fleet, unchanged.

Owns what `AsyncLLM` does differently over a fleet.  Runs in the daemon and never opens a CUDA context: only workers
touch a device.
"""

import asyncio
import contextlib
import copy
import functools
import json
import warnings
from collections.abc import AsyncGenerator
from typing import Any, ClassVar
from weakref import WeakSet

import msgspec
from vllm.config import VllmConfig
from vllm.envs import enable_envs_cache
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams, check_json_nesting
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreRequest, async_llm, logprobs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import StatLoggerManager, load_stat_logger_plugin_factories
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from melld.config import SERVED_MODEL_NAME, Config
from melld.engine.arguments import async_engine_args, engine_config
from melld.engine.fleet.fleet import Fleet
from melld.engine.frontend.caller import caller
from melld.engine.frontend.fleet_client import FleetClient
from melld.engine.frontend.judges import Judges
from melld.engine.frontend.masks import Masks
from melld.engine.frontend.plain_outputs import before_vllm, gather, take_plain
from melld.engine.frontend.prompt_logprobs import PromptLogprobs
from melld.engine.frontend.step_logger import StepLogger, step_taker
from melld.engine.frontend.tokens.copies import forget_tokenizers
from melld.engine.frontend.tokens.many import decode_many
from melld.engine.frontend.tokens.texts import TokenTexts
from melld.engine.frontend.turns import Turns
from melld.errors import MelldError

# vLLM copies each tensor out of its frame, but torch warns because the frame is read-only.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)


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
    media_readers: ClassVar["WeakSet[Frontend]"] = WeakSet()
    """Of this process, as vLLM's caches are."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Make it without a fleet, and outside of any loop, which vLLM would start to read outputs on."""
        engine = Executor.get_class(vllm_config)
        super().__init__(vllm_config=vllm_config, executor_class=engine, log_stats=False, log_requests=False)
        if self.renderer.mm_processor is not None:
            self.media_readers.add(self)
        self._loggers = [StepLogger, *load_stat_logger_plugin_factories()]

    def connect(self, fleet: Fleet, tasks: tuple[str, ...], judges: Judges) -> None:
        """Serve by this fleet; register vLLM's metrics, which depend on what its workers have found out."""
        processor, states, turns = self.output_processor, dict[str, Any](), Turns()
        prompt_logprobs = PromptLogprobs(states, fleet.outputs.put_nowait, turns)
        vocabulary = self.model_config.get_vocab_size()
        client = FleetClient(fleet, tasks, vocabulary, prompt_logprobs, Masks(states, vocabulary), turns)
        for counts in (self, processor, processor.lora_states):
            counts.log_stats = True
        self.logger_manager = StatLoggerManager(self.vllm_config, client.engine_ranks_managed, self._loggers)
        self.logger_manager.log_engine_initialized()
        processor.request_states = states
        processor.process_outputs = before_vllm(states, processor.process_outputs)
        client.take_step = step_taker(states, self.logger_manager.stat_loggers)
        client.take_plain = functools.partial(take_plain, states)
        self.engine_core = client
        self.judges = judges
        self._turns = turns
        self._failures = fleet.requests.failures
        self.input_processor.structured_outputs_config = None
        # Logprobs of an answer are kept as lists of numbers: as a million objects they would stall the loop at every
        # garbage collection.
        logprobs.create_sample_logprobs = lambda _flat: FlatLogprobs()
        if not isinstance(logprobs.convert_ids_list_to_tokens, TokenTexts):
            logprobs.convert_ids_list_to_tokens = TokenTexts(convert_ids_list_to_tokens)
        backend_xgrammar.validate_xgrammar_grammar = _look_only
        enable_envs_cache()  # vLLM looks some of them up for each token

    def shutdown(self, timeout: float | None = None) -> None:
        """See `AsyncLLM`.  The tokenizer goes too, unless another model reads media and needs vLLM's caches."""
        super().shutdown(timeout)
        self.media_readers.discard(self)
        if not self.media_readers:
            forget_tokenizers()

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
            decode_many(state.detokenizer)

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


async_llm.load_stat_logger_plugin_factories = list  # `connect` makes plugins' loggers: not here, and not twice


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
