"""Budgets each step of an engine: decodes first, and prompts get the time that they leave.

Owns the order of `running`, the two limits by which vLLM spends a step, and what the steps were seen to cost.  vLLM
spends in the order of `running`, then on requests that wait: by itself a long prompt takes all, step after step, and a
request that has just arrived by a move waits until that prompt ends.

    limit of a step    = chunk + decodes + arrivals      scheduler.max_num_scheduled_tokens
    limit of a prompt  = chunk, shared out among the prompts under way while an arrival waits, or one that goes first
                                                         scheduler_config.long_prefill_token_threshold

The chunk is what the target leaves beside the decodes, and without a target all that vLLM allows.  Where nobody would
wait for the step, whoever comes meanwhile would: it takes a part of a first token's time.  The first step of an
arrival, whose client has waited for it already, is no longer than its decodes: each prompt gets one token.
"""

import collections
import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from melld.engine.wire.spec import StepLimit
from melld.migrate.snapshot import WARM_SUFFIX
from melld.scheduler.steptimes import StepTimes
from melld.scheduler.targets import Targets

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

FIRST = -1_000
"""More urgent than any client may be."""
LOOK_S = 1.0
PROMPTS_PART = 0.25
"""Part of the target of first tokens that a step of prompts alone may take: who comes meanwhile waits for its end."""


class Ages:
    """The queue of one engine; requests older than `age_s` go before all others, in order of arrival.

    vLLM's line goes by priority alone, so a request that it has preempted, or not begun, would wait for as long as more
    urgent ones come.  Counts anew once it has run.  Leaves a line alone that is first come, first served.
    """

    def __init__(self, scheduler: "Scheduler", age_s: float, clock: Callable[[], float]) -> None:
        self._scheduler: Any = scheduler
        self._age_s = age_s if scheduler.policy.value == "priority" else math.inf
        self._clock = clock
        self._since_s: dict[str, float] = {}
        self._next_look_s = 0.0

    def look(self) -> None:
        """Move requests that have waited too long to the front; call it before each step."""
        line, now_s = self._scheduler.waiting, self._clock()
        if now_s < self._next_look_s or not (line or self._since_s):
            return
        self._next_look_s = now_s + LOOK_S
        before, self._since_s = self._since_s, {}
        for request in list(line):
            since_s = self._since_s[request.request_id] = before.get(request.request_id, now_s)
            if now_s - since_s >= self._age_s and request.priority != FIRST:
                line.remove_request(request)
                request.priority = FIRST
                line.add_request(request)


class Awaited(NamedTuple):
    """A request without a first token: its arrival, its prompt's duration, and whether it can still be on time."""

    arrived_s: float
    prompt_s: float
    may_be_in_time: bool = True


class DueTimes:
    """When first tokens are due, which orders an engine's queue among requests of one priority.

    vLLM's line goes by their arrival, so that a short question waits until the book before it is read.  Where first
    come, first served is in time for all, so is whoever is due first; where it is not, those who are late wait for
    those who can be in time (`Targets.later_s`).  `arrival_time` says that until the first token, and afterwards again
    who came last, whom vLLM preempts.  `ttft_s`: the target.  `clock`: the one that arrivals are told by.
    """

    def __init__(self, scheduler: "Scheduler", ttft_s: float, times: StepTimes, clock: Callable[[], float]) -> None:
        self._times = times
        self._scheduler: Any = scheduler
        self._targets = Targets(ttft_s=ttft_s)
        self._clock = clock
        self._awaited: weakref.WeakKeyDictionary[Request, Awaited] = weakref.WeakKeyDictionary()

    def look(self) -> None:
        """Note first tokens that have come, and those that will be late; call it before each step."""
        if self._awaited:
            for request in self._scheduler.running:
                if not request.is_prefill_chunk and (awaited := self._awaited.pop(request, None)) is not None:
                    request.arrival_time = awaited.arrived_s
            line, now_s = self._scheduler.waiting, self._clock()
            while line and self._is_late(line.peek_request(), now_s):
                line.add_request(self._put_off(line.pop_request()))

    def lines_up(self, request: "Request") -> None:
        """Set the request's due time, before it joins the queue."""
        costs = self._times.costs
        is_awaited = not request.num_output_tokens and not request.request_id.endswith(WARM_SUFFIX)
        if costs is not None and is_awaited and request not in self._awaited:
            prompt_s = costs.prompt_token_s * request.num_prompt_tokens
            self._awaited[request] = Awaited(request.arrival_time, prompt_s)
            request.arrival_time += self._targets.first_token_s(prompt_s)

    def _is_late(self, request: "Request", now_s: float) -> bool:
        awaited = self._awaited.get(request)
        return awaited is not None and awaited.may_be_in_time and now_s + awaited.prompt_s > request.arrival_time

    def _put_off(self, request: "Request") -> "Request":
        awaited = self._awaited[request]
        self._awaited[request] = awaited._replace(may_be_in_time=False)
        request.arrival_time += self._targets.later_s(awaited.prompt_s)
        return request


class StepCounts(NamedTuple):
    """Counts of what a step computed."""

    decodes: int = 0
    prompt_tokens: int = 0


class StepBudget:
    """The steps of one engine.  `limit`: how long a step with decodes may take; None: no limit.

    `times` learns what they take.  `ttft_s`: the target of first tokens.  `expected` returns how many requests have a
    reservation here: they may go on at any moment.  `ages` looks at those that wait before each step.  `clock`: the one
    that arrivals are told by.
    """

    def __init__(
        self,
        engine: "EngineCore",
        times: StepTimes,
        limit: StepLimit | None,
        ttft_s: float,
        expected: Callable[[], int],
        ages: Ages,
        clock: Callable[[], float],
    ) -> None:
        self.limit = limit
        self._prompts_s = PROMPTS_PART * ttft_s
        self._ages = ages
        self.times = times
        self._scheduler: Any = engine.scheduler
        self._due = DueTimes(self._scheduler, ttft_s, times, clock)
        self._expected = expected
        self._config = config = self._scheduler.scheduler_config
        self._most_tokens = int(self._scheduler.max_num_scheduled_tokens)
        self._own_chunk = int(config.long_prefill_token_threshold)
        # Prompts that must be computed whole, or whose least share vLLM computes itself, cannot be cut by us.
        self._cuts = config.enable_chunked_prefill and not self._scheduler.adaptive_long_prefill_threshold
        self._arrived: set[str] = set()
        self._decode_tokens = 1 + self._scheduler.num_spec_tokens
        self._engine = engine
        self._in_flight: collections.deque[StepCounts] = collections.deque(
            maxlen=engine.vllm_config.max_concurrent_batches
        )
        self.lines_up = self._due.lines_up
        self._scheduler.steps = self

    def stepped(self, step_s: float) -> StepCounts:
        """Learn from the step that just ended; return what it computed, nothing if it only started others."""
        if len(self._in_flight) <= len(self._engine.batch_queue or ()):
            return StepCounts()
        counts = self._in_flight.popleft()
        self.times.stepped(step_s, *counts)
        return counts

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Leave vLLM's steps unlimited for the duration of the block."""
        self._limit(self._most_tokens, self._own_chunk)
        self._scheduler.steps = None
        try:
            yield
        finally:
            self._in_flight.clear()
            self._scheduler.steps = self

    def scheduled(self, output: "SchedulerOutput") -> None:
        """Note what a step will compute."""
        tokens = output.num_scheduled_tokens.values()
        prompts = [count for count in tokens if count > self._decode_tokens]
        self._in_flight.append(StepCounts(len(tokens) - len(prompts), sum(prompts)))

    def before(self) -> None:
        """Order decodes first, then prompts by priority and due time, and set the step's limits."""
        self._due.look()
        self._ages.look()
        scheduler = self._scheduler
        prompts = [request for request in scheduler.running if request.is_prefill_chunk]
        if prompts:
            decoding = [request for request in scheduler.running if not request.is_prefill_chunk]
            prompts.sort(key=_turn)
            scheduler.running[:] = decoding + prompts
        if self._cuts and (prompts or scheduler.waiting or scheduler.kv_holding_waiting):
            urgent = prompts and scheduler.waiting and _turn(scheduler.waiting.peek_request()) < _turn(prompts[0])
            self._cut(len(scheduler.running) - len(prompts), len(prompts), 1 if urgent else 0)
        else:
            self._arrived.clear()
            self._limit(self._most_tokens, self._own_chunk)

    def _cut(self, decodes: int, prompts: int, urgent: int) -> None:
        """Set a step's limits for this many decoding requests and prompts in progress.

        `urgent` prompts wait that go before these: once they have begun, they stand first.
        """
        most = self._most_tokens
        holding = list(self._scheduler.kv_holding_waiting)
        arrived = {r.request_id for r in holding if r.num_tokens - r.num_computed_tokens <= 1}
        news, self._arrived = arrived - self._arrived, arrived
        streams = decodes + len(arrived)
        targeted = None
        if self.limit is not None and (costs := self.times.costs) is not None:
            limit_s = max(self.limit.seconds, self.limit.lone_steps * costs.step_s(1.0))
            if not streams and not self._expected():
                limit_s = max(limit_s, self._prompts_s)
            targeted = self.times.prompt_tokens_within(limit_s, streams)
        if targeted is None and not holding and not urgent:
            self._limit(most, self._own_chunk)
            return
        own = streams * self._decode_tokens
        sharing = max(1, prompts + len(holding) - len(arrived) + urgent) if holding or urgent else 1
        chunk = max(1, min(sharing if news else targeted or most, most - own))
        share = max(1, chunk // sharing)
        least = self._decode_tokens if self._decode_tokens > 1 else 0  # a request that arrives is padded with drafts
        own_chunk = self._own_chunk or share
        self._limit(min(most, max(chunk, share * sharing) + own), max(least, min(share, own_chunk)))

    def _limit(self, step_tokens: int, prompt_tokens: int) -> None:
        self._scheduler.max_num_scheduled_tokens = step_tokens
        self._config.long_prefill_token_threshold = prompt_tokens


def _turn(request: "Request") -> tuple[int, float]:
    """Return the sort key of vLLM's queue, smallest first."""
    return request.priority, request.arrival_time
