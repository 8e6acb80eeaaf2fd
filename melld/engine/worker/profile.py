"""Measurements of what this worker can do for migrations, on its real engine and links, while it is idle.

Owns the synthetic requests, whose outputs go nowhere, and the copies into free blocks.  Never runs beside a user's
request: it stops between two steps when any message arrives, and says so.  For the engine thread.

    prefill   B requests decode; now and then one step also prefills a foreign prompt of n tokens: the greatest n whose
              steps take, in the median, at most a share longer than the steps beside them without it
    link      the same blocks of a sibling are copied again and again, as a migration copies them, for a set time
"""

import collections
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from melld.engine.wire import messages as wire
from melld.engine.worker.links import Links
from melld.engine.worker.residency.block_tables import groups_of
from melld.engine.worker.residency.budget import StepBudget
from melld.engine.worker.residency.residency import Residency
from melld.engine.worker.start import add_own_request
from melld.errors import MelldError
from melld.migrate.transports.copies import CopyDone

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

DECODER_TOKENS = 64
"""Prompt tokens of each decoding request."""
CHUNKS = (4, 8, 16, 32, 64, 128, 256, 512)
"""Lengths of the foreign prompts to try, in tokens."""
PAIRS = 12
"""Steps with a foreign prompt, and as many without, for the medians."""
ALONE_TOKENS = 1024
ALONE_TIMES = 3
FEW_BLOCKS, COPY_BLOCKS = 4, 64
JOB = "profile"


class Interrupted(MelldError):
    """The worker is needed or has work, so nothing was measured."""


class Profiler:
    """The measurements of one worker.  `is_wanted` returns True if a message waits for it; `say` sends the answers.

    `in_step` gets the start time of a step, and 0.0 at its end, so that a step that hangs is noticed.
    """

    def __init__(
        self,
        engine: "EngineCore",
        residency: Residency,
        links: Links,
        budget: StepBudget,
        is_wanted: Callable[[], bool],
        say: Callable[[Any], None],
        in_step: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._residency = residency
        self._links = links
        self._budget = budget
        self._is_wanted = is_wanted
        self._say = say
        self._in_step = in_step
        self._chance = random.Random(1)
        self._made = 0
        self._begun: collections.deque[list[float]] = collections.deque()
        """Where the times of the steps in flight belong, the oldest first."""
        self._trials: dict[str, _LinkTrial] = {}  # by sibling

    # -- prefill -----------------------------------------------------------------------------------------------------

    def measure_prefill(self, ask: wire.MeasurePrefill) -> None:
        """Measure, and answer with tokens per second or with the reason why not."""
        try:
            with self._budget.lifted(), self._clean():
                deadline_s = time.monotonic() + ask.seconds
                tokens_per_s = self._beside(ask, deadline_s) if ask.batch else self._alone()
        except (MelldError, RuntimeError, ValueError) as error:
            self._say(wire.UtilityDone(call=ask.call, error=str(error)))
        else:
            self._say(wire.UtilityDone(call=ask.call, result=tokens_per_s))

    @contextlib.contextmanager
    def _clean(self) -> Iterator[None]:
        """Refuse if there is work; remove all synthetic requests afterwards."""
        if self._engine.scheduler.has_requests():
            raise Interrupted(wire.WANTED)
        self._begun.clear()
        try:
            yield
        finally:
            left = [name for name in self._engine.scheduler.requests if name.startswith(f"{JOB}-")]
            if left:
                self._engine.abort_requests(left)
            while self._engine.scheduler.has_requests() or self._engine.batch_queue:
                self._engine.step_fn()

    def _alone(self) -> float:
        """Return the tokens per second of prefill without decoding requests."""
        config = self._engine.vllm_config
        tokens = min(
            ALONE_TOKENS,
            config.model_config.max_model_len // 2,
            config.scheduler_config.max_num_batched_tokens,
        )
        while tokens and not self._have_room(2 * tokens):
            tokens //= 2
        if tokens < 1:
            raise ValueError("the KV cache is too small for this measurement")
        seconds: list[float] = []
        while len(seconds) <= ALONE_TIMES:
            self._add(tokens, 1)
            self._step(seconds)
        return float(tokens) / statistics.median(seconds[1:])

    def _beside(self, ask: wire.MeasurePrefill, deadline_s: float) -> float:
        """Return the foreign tokens per second of which each step's lengthen it by the share, interpolated."""
        config = self._engine.vllm_config
        steps = len(CHUNKS) * 2 * PAIRS + 2 * ask.batch
        if ask.batch >= (slots := self._engine.scheduler.max_num_active_reqs):
            raise ValueError(f"the worker runs at most {slots} requests")
        if DECODER_TOKENS + steps >= config.model_config.max_model_len:
            raise ValueError(f"requests have at most {config.model_config.max_model_len} tokens")
        if not self._have_room(*[DECODER_TOKENS + steps] * ask.batch, CHUNKS[-1]):
            raise ValueError("the KV cache is too small for this measurement")
        for _ in range(ask.batch):
            self._add(DECODER_TOKENS, steps)
        while any(not request.num_output_tokens for request in self._engine.scheduler.requests.values()):
            self._step([])
        fewer, fewer_ratio, step_s = 0.0, 1.0, 0.0
        most = config.scheduler_config.max_num_batched_tokens - ask.batch
        for tokens in (chunk for chunk in CHUNKS if chunk <= most):
            step_s, ratio = self._compare(tokens)
            if ratio > 1.0 + ask.share:
                part = max(1.0 + ask.share - fewer_ratio, 0.0) / (ratio - fewer_ratio)
                fewer += part * (tokens - fewer)
                break
            fewer, fewer_ratio = tokens, max(ratio, 1.0)
            if time.monotonic() > deadline_s:
                break
        return fewer / max(step_s * (1.0 + ask.share), 1e-9)

    def _compare(self, tokens: int) -> tuple[float, float]:
        """Return the median step without the foreign prompt, and the factor by which the prompt lengthens it."""
        without: list[float] = []
        beside: list[float] = []
        for _ in range(PAIRS):
            self._step(without)
            self._add(tokens, 1)
            self._step(beside)
        step_s = statistics.median(without)
        return step_s, statistics.median(beside) / step_s

    def _step(self, seconds: list[float]) -> None:
        """Begin a step whose time belongs into this list, and note that of the step that ends, perhaps an earlier one.

        Outputs are dropped.
        """
        if self._is_wanted():
            raise Interrupted(wire.WANTED)
        self._begun.append(seconds)
        began_s = time.monotonic()
        self._in_step(began_s)
        try:
            _, executed = self._engine.step_fn()
            self._engine.post_step(model_executed=executed)
        finally:
            self._in_step(0.0)
        if len(self._begun) > len(self._engine.batch_queue or ()):
            self._begun.popleft().append(time.monotonic() - began_s)

    def _add(self, prompt_tokens: int, output_tokens: int) -> None:
        """Add a request of random tokens, which no prefix cache holds."""
        from vllm.sampling_params import SamplingParams

        self._made += 1
        vocabulary = self._engine.vllm_config.model_config.get_vocab_size()
        tokens = [self._chance.randrange(vocabulary) for _ in range(prompt_tokens)]
        parameters = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        add_own_request(self._engine, f"{JOB}-{self._made}", tokens, parameters)

    def _have_room(self, *requests: int) -> bool:
        """Return True if requests of so many tokens fit into the free blocks together."""
        groups, pool = groups_of(self._engine.scheduler), self._engine.scheduler.kv_cache_manager.block_pool
        blocks = sum(group.blocks_for_tokens(tokens) for group in groups for tokens in requests)
        return blocks <= int(pool.get_num_free_blocks())

    # -- links -------------------------------------------------------------------------------------------------------

    def measure_link(self, ask: wire.MeasureLink) -> None:
        """Start to copy from the sibling; answer with bytes per second when the time is over.

        Several siblings may be copied from at once, each into its own blocks.
        """
        copies = self._links.to(ask.peer)
        if copies is None or ask.peer in self._trials or self._engine.scheduler.has_requests():
            why = wire.WANTED if copies is not None else f"there is no link to {ask.peer}"
            self._say(wire.UtilityDone(call=ask.call, error=why))
            return
        scratch = self._residency.borrow_scratch(min(COPY_BLOCKS, ask.blocks))
        if not scratch:
            self._say(wire.UtilityDone(call=ask.call, error="the worker has no free block"))
            return
        trial = self._trials[ask.peer] = _LinkTrial(ask, copies, scratch)
        trial.copy()

    def copied(self, done: CopyDone) -> bool:
        """Count the ended copy and return True if it belongs to a trial."""
        trial = next((one for one in self._trials.values() if one.owns(done.job)), None)
        if trial is None:
            return False
        trial.count(done)
        busy = self._engine.scheduler.has_requests()
        failure = done.failure or (wire.WANTED if busy else "") or ("the link was closed" if done.cancelled else "")
        if not trial.is_over() and not failure:
            trial.copy()
            return True
        del self._trials[trial.ask.peer]
        self._residency.return_scratch(trial.scratch)
        if failure:
            self._say(wire.UtilityDone(call=trial.ask.call, error=failure))
        else:
            self._say(wire.UtilityDone(call=trial.ask.call, result=trial.nbytes / max(trial.seconds, 1e-9)))
        return True


class _LinkTrial:
    """Repeated copies over one link, larger and larger until they take long; those of the last size count."""

    def __init__(self, ask: wire.MeasureLink, copies: Any, scratch: list[int]) -> None:
        self.ask = ask
        self.scratch = scratch
        self.nbytes = 0
        self.seconds = 0.0
        self._copies = copies
        self._blocks = min(FEW_BLOCKS, len(scratch))
        self._counts = False
        self._name = f"{JOB}.{ask.call}"
        self._jobs = 0
        self._began_s = 0.0
        self._end_s = time.monotonic() + ask.seconds

    def copy(self) -> None:
        """Copy the sibling's first blocks again, without block 0, vLLM's null block."""
        self._jobs += 1
        self._began_s = time.monotonic()
        destination = self.scratch[: self._blocks]
        self._copies.submit(f"{self._name}.{self._jobs}", range(1, self._blocks + 1), destination)

    def owns(self, job: str) -> bool:
        """Return True if the copy belongs to this trial."""
        return job.rpartition(".")[0] == self._name

    def count(self, done: CopyDone) -> None:
        """Add the bytes, and the seconds from the request for them until the engine saw the end."""
        took_s = time.monotonic() - self._began_s
        if self._counts and done.pulled is not None:
            self.nbytes += done.pulled.nbytes
            self.seconds += took_s
        elif self._blocks == len(self.scratch) or took_s > self.ask.seconds / 4:
            self._counts = True  # that copy has warmed the link up
        else:
            self._blocks = min(2 * self._blocks, len(self.scratch))

    def is_over(self) -> bool:
        """Return True once the time is over and at least one copy has been measured."""
        return time.monotonic() >= self._end_s and self.nbytes > 0
