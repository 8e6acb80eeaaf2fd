"""A request's state in the model runner: what each of vLLM's two runners keeps, and needs on arrival.

Owns the only lines that touch a runner.  Never touches the scheduler.

    V1 (vllm.v1.worker.gpu_model_runner; all of the CPU): a CachedRequestState per request, with its sampling generator,
        outlives the request's absence from the batch.  A request that arrives with tokens needs one made for it.
    V2 (vllm.v1.worker.gpu; the default with Triton): a slot per request, rebuilt from the scheduler's output
        (`prefill_token_ids`) whenever a request comes back; sampling draws from seed and position, without a state.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


class RewindableGenerator(torch.Generator):  # type: ignore[misc]
    """A CPU generator whose draws since `mark` are undone by `set_offset`.

    A fix of vLLM 0.32.0 on the CPU: its V1 runner samples for every row of a batch, even for a partly computed prompt,
    discards that sample and rewinds the row's generator by `set_offset`, which CPU generators lack: a seeded request
    with a chunked prompt crashed the engine.
    """

    def __new__(cls) -> "RewindableGenerator":
        """Create the generator on the CPU: torch.Generator takes its device on creation."""
        generator: RewindableGenerator = super().__new__(cls, device="cpu")
        return generator

    def mark(self) -> None:
        """Remember this state."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        """Return an offset for the runner to subtract from; `set_offset` ignores the result."""
        return 0

    def set_offset(self, offset: int) -> None:  # noqa: ARG002  any offset means: before this step
        """Return to the marked state.  `mark` runs before every step whose sample may be discarded."""
        self.set_state(self._marked)


def make_generators_rewindable(runner: Any) -> None:
    """Have this CPU runner (vllm.v1.worker.gpu_model_runner) keep `RewindableGenerator`s and mark them in time."""
    update_states = runner._update_states  # noqa: SLF001

    def update_and_mark(scheduler_output: Any) -> Any:
        result = update_states(scheduler_output)
        if runner.input_batch.generators:
            _mark(runner, scheduler_output.num_scheduled_tokens)
        return result

    runner._update_states = update_and_mark  # noqa: SLF001


def _mark(runner: Any, scheduled_tokens: dict[str, int]) -> None:
    batch = runner.input_batch
    for index, generator in batch.generators.items():
        state = runner.requests[batch.req_ids[index]]
        rewindable = generator
        if not isinstance(generator, RewindableGenerator):
            rewindable = RewindableGenerator()
            rewindable.set_state(generator.get_state())
            batch.generators[index] = state.generator = rewindable
        if state.num_computed_tokens + scheduled_tokens[state.req_id] < state.num_tokens:
            rewindable.mark()


def forget_states(runner: Any) -> None:
    """Make this runner (vllm.v1.worker.gpu_model_runner) forget an ended request's state column at once.

    A fix of vLLM 0.32.0, which forgets it only in a step that computes, and not for a request that is new again: one
    that comes back under its id would be taken to have its state where it once was.
    """
    update_states = runner._update_states  # noqa: SLF001

    def forget_and_update(scheduler_output: Any) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            runner.mamba_state_idx.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            runner.mamba_state_idx.pop(request.req_id, None)
        return update_states(scheduler_output)

    runner._update_states = forget_and_update  # noqa: SLF001


def know_all_outputs(batch: Any) -> None:
    """Make this empty batch (vllm.v1.worker.gpu_input_batch) record each sampled token before the next step.

    A fix of vLLM 0.32.0, which with async scheduling learns them only while a request of the batch has penalties or
    bad words.  When such a one comes, all placeholders at the end of another's list give way to one token: the list
    grows shorter, and `min_tokens` holds longer.
    """
    batch.logitsprocs_need_output_token_ids = True


def forget_budgets(holder: Any) -> None:
    """Make this budget holder (vllm.v1.sample.thinking_budget_state) forget those of ended requests.

    A fix of vLLM 0.32.0, which keeps the budget of a row that a request without one moves into: the end of a thought
    is forced into the text of a request that never thought.
    """
    from vllm.v1.sample.logits_processor.interface import MoveDirectionality

    sync_batch = holder.sync_batch

    def forget_and_sync(update: Any) -> None:
        for _, row, direction in update.moved:
            if direction is MoveDirectionality.UNIDIRECTIONAL:
                holder._state.pop(row, None)  # noqa: SLF001  nobody's: requests move only into empty rows
        sync_batch(update)

    holder.sync_batch = forget_and_sync


class Runner:
    """A model runner that keeps nothing of a request: V2, whose draws depend on seed and position alone."""

    holds_slot_while_away = True
    """A detached request must be reported as preempted, to free its slot."""

    def generator_state(self, request_id: str) -> bytes | None:  # noqa: ARG002
        """Return the state of the request's sampling generator, if this runner keeps one for it."""
        return None

    def admit(self, request: "Request", block_ids: tuple[list[int], ...], generator_state: bytes | None) -> None:
        """Add a request to the runner that the scheduler will present as resumed; its output may carry all tokens."""


class RunnerV1(Runner):
    """The runner of vllm.v1.worker.gpu_model_runner (and its CPU subclass)."""

    holds_slot_while_away = False

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        if runner.device.type == "cpu":
            make_generators_rewindable(runner)
        if runner.cache_config.mamba_cache_mode == "align":
            forget_states(runner)
        if runner.use_async_scheduling:
            know_all_outputs(runner.input_batch)
        if (holder := runner.input_batch.thinking_budget_state_holder) is not None:
            forget_budgets(holder)

    def generator_state(self, request_id: str) -> bytes | None:
        """Return the state, empty for a request that is not seeded or has never run here."""
        state = self._runner.requests.get(request_id)
        if state is None or state.generator is None:
            return None
        return bytes(state.generator.get_state().numpy().tobytes())

    def admit(self, request: "Request", block_ids: tuple[list[int], ...], generator_state: bytes | None) -> None:
        """Add a request to the runner."""
        self.take(_state_of(request, block_ids), generator_state)

    def take(self, state: "CachedRequestState", generator_state: bytes | None) -> None:
        """Add the state of a request to the runner, which provides its generator."""
        state.generator = self._generator(state, generator_state)
        if self._runner.uses_mrope:
            self._runner._init_mrope_positions(state)  # noqa: SLF001  the runner's own way for a new request
        self._runner.requests[state.req_id] = state

    def replace_block(self, request_id: str, group: int, place: int, block_id: int) -> None:
        """Put this block at that position of the running request's table for its next step."""
        self._runner.requests[request_id].block_ids[group][place] = block_id
        batch = self._runner.input_batch
        if (row := batch.req_id_to_index.get(request_id)) is not None:
            batch.block_table[group].block_table.np[row, place] = block_id

    def _generator(self, state: "CachedRequestState", generator_state: bytes | None) -> torch.Generator | None:
        from vllm.sampling_params import SamplingType

        params = state.sampling_params
        if params is None or params.sampling_type != SamplingType.RANDOM_SEED:
            return None
        device = self._runner.device
        generator = RewindableGenerator() if device.type == "cpu" else torch.Generator(device=device)
        if generator_state is None:  # only the tokens survived: their number is the number of draws
            generator.manual_seed(params.seed)
            skip_draws(generator, len(state.output_token_ids))
        else:
            generator.set_state(torch.frombuffer(bytearray(generator_state), dtype=torch.uint8))
        return generator


def skip_draws(generator: torch.Generator, draws: int) -> None:
    """Advance a fresh generator to its state after `draws` sampled tokens.

    Not for drafted tokens, each of which takes draws of its own.  The CPU sampler draws one integer a token
    (vllm.v1.sample.ops.topk_topp_sampler, `forward_cpu`); a draw of a CUDA generator is four steps of its offset (as
    the runner counts them when it takes one back).
    """
    if generator.device.type == "cuda":
        generator.set_offset(4 * draws)
        return
    for _ in range(draws):
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)


def _state_of(request: "Request", block_ids: tuple[list[int], ...]) -> "CachedRequestState":
    """Return what a V1 runner keeps of an arriving request, without its generator."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    return CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        generator=None,
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens,
        output_token_ids=list(request.output_token_ids),
        lora_request=request.lora_request,
    )


class RanksV1(Runner):
    """The V1 runners of a worker with several devices, each in a process of its own (`worker.ranks`).

    All of them sample, with generators in the same state, so that each knows the next input.
    """

    holds_slot_while_away = False

    def __init__(self, executor: "Executor") -> None:
        self._call: Any = executor.collective_rpc
        self._call(_runner_here)

    def generator_state(self, request_id: str) -> bytes | None:
        """Return the state that all ranks have."""
        state: bytes | None = self._call(_generator_state, args=(request_id,))[0]
        return state

    def admit(self, request: "Request", block_ids: tuple[list[int], ...], generator_state: bytes | None) -> None:
        """Add a request to each rank's runner."""
        self._call(_take, args=(_state_of(request, block_ids), generator_state))


@functools.cache
def _runner_of_rank(rank: Any) -> RunnerV1:
    return RunnerV1(rank.worker.model_runner)


def _runner_here(rank: Any) -> None:
    _runner_of_rank(rank)


def _generator_state(rank: Any, request_id: str) -> bytes | None:
    return _runner_of_rank(rank).generator_state(request_id)


def _take(rank: Any, state: "CachedRequestState", generator_state: bytes | None) -> None:
    _runner_of_rank(rank).take(state, generator_state)


def runner_of(engine: "EngineCore") -> Runner:
    """Return the adapter for the runners of this engine, in this process or in its ranks."""
    scheduler: Any = engine.scheduler
    if scheduler.use_v2_model_runner:
        return Runner()
    if engine.vllm_config.parallel_config.world_size > 1:
        return RanksV1(engine.model_executor)
    return RunnerV1(model_runner_of(engine))


def model_runner_of(engine: "EngineCore") -> Any:
    """Return vLLM's runner of an engine with one device, in this process."""
    executor: Any = engine.model_executor
    return executor.driver_worker.worker.model_runner
