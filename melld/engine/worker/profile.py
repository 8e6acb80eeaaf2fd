"""What this worker can do for migrations beside its own work: measured on its real engine and links, while it is idle.

Owns the synthetic requests, which nobody hears of, and the copies into blocks that nobody holds.  Never runs beside a
user's request: it ends between two steps when anything is asked of the worker, and says so.  For the engine thread.

    prefill   B requests decode; now and then one step also prefills a foreign prompt of n tokens: the greatest n whose
              steps take, in the median, at most a share longer than the steps beside them without it
    link      the same blocks of a sibling are copied again and again, as a migration copies them, for a set time
"""

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from melld.engine.wire import messages as wire
from melld.engine.worker.links import Links
from melld.engine.worker.residency.residency import Residency
from melld.engine.worker.start import add_own_request
from melld.errors import MelldError
from melld.migrate.transports.copies import CopyDone

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

DECODER_TOKENS = 64
"""The prompt of each request that decodes."""
CHUNKS = (4, 8, 16, 32, 64, 128, 256, 512)
"""Foreign prompts that are tried, in tokens."""
PAIRS = 12
"""Steps with a foreign prompt, and as many without, from which the medians are taken."""
ALONE_TOKENS = 1024
ALONE_TIMES = 3
COPY_BLOCKS = 64
JOB = "profile"


class Interrupted(MelldError):
    """Somebody wants the worker, or it had work: nothing was measured."""


class Profiler:
    """`is_wanted`: whether anything is asked of the worker now.  `say` takes the answers.

    `in_step` is told when a step began, and 0.0 when it is over: a step that hangs is seen from outside.
    """

    def __init__(
        self,
        engine: "EngineCore",
        residency: Residency,
        links: Links,
        is_wanted: Callable[[], bool],
        say: Callable[[Any], None],
        in_step: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._residency = residency
        self._links = links
        self._is_wanted = is_wanted
        self._say = say
        self._in_step = in_step
        self._chance = random.Random(1)
        self._made = 0
        self._trials: dict[str, _LinkTrial] = {}  # by sibling

    # -- prefill -----------------------------------------------------------------------------------------------------

    def measure_prefill(self, ask: wire.MeasurePrefill) -> None:
        """Answer with `wire.PrefillMeasured`, or with why it could not be measured."""
        try:
            with self._clean():
                deadline_s = time.monotonic() + ask.seconds
                measured = self._beside(ask, deadline_s) if ask.batch else self._alone()
        except (MelldError, RuntimeError, ValueError) as error:
            self._say(wire.UtilityDone(call=ask.call, error=str(error)))
        else:
            self._say(wire.UtilityDone(call=ask.call, result=measured))

    @contextlib.contextmanager
    def _clean(self) -> Iterator[None]:
        """Refuse where there is work; afterwards nothing is left of what was measured with."""
        if self._engine.scheduler.has_requests():
            raise Interrupted(wire.WANTED)
        try:
            yield
        finally:
            left = [name for name in self._engine.scheduler.requests if name.startswith(f"{JOB}-")]
            if left:
                self._engine.abort_requests(left)
            while self._engine.scheduler.has_requests() or self._engine.batch_queue:
                self._engine.step_fn()

    def _alone(self) -> wire.PrefillMeasured:
        """Nobody decodes: as many tokens as it can."""
        config = self._engine.vllm_config
        tokens = min(
            ALONE_TOKENS,
            config.model_config.max_model_len // 2,
            config.scheduler_config.max_num_batched_tokens,
            self._free_tokens() // 2,
        )
        seconds = []
        for _ in range(ALONE_TIMES + 1):
            self._add(tokens, 1)
            seconds.append(self._step())
        return wire.PrefillMeasured(tokens=tokens, seconds=statistics.median(seconds[1:]), step_s=0.0)

    def _beside(self, ask: wire.MeasurePrefill, deadline_s: float) -> wire.PrefillMeasured:
        """The foreign tokens per step that make the median step longer by the share, between two of those tried."""
        config = self._engine.vllm_config
        steps = len(CHUNKS) * 2 * PAIRS + 2 * ask.batch
        if ask.batch >= config.scheduler_config.max_num_seqs:
            raise ValueError(f"it runs at most {config.scheduler_config.max_num_seqs} requests")
        if DECODER_TOKENS + steps >= config.model_config.max_model_len:
            raise ValueError(f"its requests have at most {config.model_config.max_model_len} tokens")
        if ask.batch * (DECODER_TOKENS + steps) + CHUNKS[-1] > self._free_tokens():
            raise ValueError("its KV cache is too small for that")
        for _ in range(ask.batch):
            self._add(DECODER_TOKENS, steps)
        while any(not request.num_output_tokens for request in self._engine.scheduler.requests.values()):
            self._step()
        fewer, fewer_ratio, step_s = 0, 1.0, 0.0
        most = config.scheduler_config.max_num_batched_tokens - ask.batch
        for tokens in (chunk for chunk in CHUNKS if chunk <= most):
            step_s, ratio = self._compare(tokens)
            if ratio > 1.0 + ask.share:
                part = max(1.0 + ask.share - fewer_ratio, 0.0) / (ratio - fewer_ratio)
                reached = fewer + part * (tokens - fewer)
                return wire.PrefillMeasured(tokens=reached, seconds=step_s * (1.0 + ask.share), step_s=step_s)
            fewer, fewer_ratio = tokens, max(ratio, 1.0)
            if time.monotonic() > deadline_s:
                break
        return wire.PrefillMeasured(tokens=fewer, seconds=step_s * (1.0 + ask.share), step_s=step_s)

    def _compare(self, tokens: int) -> tuple[float, float]:
        """The median step without the foreign prompt, and how many times as long it is with it."""
        without, beside = [], []
        for _ in range(PAIRS):
            without.append(self._step())
            self._add(tokens, 1)
            beside.append(self._step())
        step_s = statistics.median(without)
        return step_s, statistics.median(beside) / step_s

    def _step(self) -> float:
        """Seconds of one step.  Its outputs are for nobody."""
        if self._is_wanted():
            raise Interrupted(wire.WANTED)
        began_s = time.monotonic()
        self._in_step(began_s)
        try:
            _, executed = self._engine.step_fn()
            self._engine.post_step(model_executed=executed)
        finally:
            self._in_step(0.0)
        return time.monotonic() - began_s

    def _add(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request of random tokens, which no prefix cache knows."""
        from vllm.sampling_params import SamplingParams

        self._made += 1
        vocabulary = self._engine.vllm_config.model_config.get_vocab_size()
        tokens = [self._chance.randrange(vocabulary) for _ in range(prompt_tokens)]
        parameters = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        add_own_request(self._engine, f"{JOB}-{self._made}", tokens, parameters)

    def _free_tokens(self) -> int:
        pool = self._engine.scheduler.kv_cache_manager.block_pool
        return int(pool.get_num_free_blocks() * self._engine.vllm_config.cache_config.block_size)

    # -- links -------------------------------------------------------------------------------------------------------

    def measure_link(self, ask: wire.MeasureLink) -> None:
        """Begin to copy from the sibling; `wire.LinkMeasured` is the answer when the time is over.

        Several siblings may be copied from at once, each into its own blocks.
        """
        copies = self._links.to(ask.peer)
        if copies is None or ask.peer in self._trials or self._engine.scheduler.has_requests():
            why = wire.WANTED if copies is not None else f"there is no link to {ask.peer}"
            self._say(wire.UtilityDone(call=ask.call, error=why))
            return
        scratch = self._residency.borrow_scratch(min(COPY_BLOCKS, ask.blocks))
        if not scratch:
            self._say(wire.UtilityDone(call=ask.call, error="it has no free block"))
            return
        trial = self._trials[ask.peer] = _LinkTrial(ask, copies, scratch)
        trial.copy()

    def copied(self, done: CopyDone) -> bool:
        """Whether it was a copy of ours that has ended."""
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
            measured = wire.LinkMeasured(nbytes=trial.nbytes, seconds=trial.seconds)
            self._say(wire.UtilityDone(call=trial.ask.call, result=measured))
        return True


class _LinkTrial:
    """Copies over one link.  The first one warms it up and does not count."""

    def __init__(self, ask: wire.MeasureLink, copies: Any, scratch: list[int]) -> None:
        self.ask = ask
        self.scratch = scratch
        self.nbytes = 0
        self.seconds = 0.0
        self._copies = copies
        self._name = f"{JOB}.{ask.call}"
        self._jobs = 0
        self._began_s = 0.0
        self._end_s = time.monotonic() + ask.seconds

    def copy(self) -> None:
        """The sibling's first blocks, once more; block 0 is nobody's."""
        self._jobs += 1
        self._began_s = time.monotonic()
        self._copies.submit(f"{self._name}.{self._jobs}", range(1, len(self.scratch) + 1), self.scratch)

    def owns(self, job: str) -> bool:
        """Whether the copy is one of this trial's."""
        return job.rpartition(".")[0] == self._name

    def count(self, done: CopyDone) -> None:
        """Bytes, and the seconds from the wish for them until the engine knew that they were there."""
        if done.pulled is not None and self._jobs > 1:
            self.nbytes += done.pulled.nbytes
            self.seconds += time.monotonic() - self._began_s

    def is_over(self) -> bool:
        """Whether the time for it is over and something has been measured."""
        return time.monotonic() >= self._end_s and self.nbytes > 0
