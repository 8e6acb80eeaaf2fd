"""Reckons how many workers the load needs: by memory, by prompts, and by the pace of the steps.

    memory    the KV of all requests, with its recent sure growth continued until a new worker has filled, in 94 % of it
    prompts   at most 60 % of each worker's time
    pace      beside an even share of the prompts, which come at random, at most as many answers are slow as may be
    bursts    at a rate to which prompts have surely just risen (over the promised time to a first token), the same part
              of the time, and the mean pace

Owns the recent history of the load, and the hysteresis: the number rises at once, and falls to the most that stricter
limits asked for in the last 15 seconds, or in fewer where workers without requests shall sleep sooner.  Never wakes a
worker.
"""

import collections
import math

from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.slo import constants
from melld.scheduler.policies.slo.answers import Answers
from melld.scheduler.policies.slo.models import StepModel
from melld.scheduler.targets import Targets


class PromptRate:
    """Seconds of prompts accepted per second.  `memory_s`: the time in which a prompt's weight falls to 1/e."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._sum = self._squares = self._at_s = 0.0
        self._begun_s: float | None = None

    def accept(self, prefill_s: float, now_s: float) -> None:
        """Note a prompt that takes so long."""
        self._fade(now_s)
        self._sum += prefill_s / self._memory_s
        self._squares += prefill_s * prefill_s / self._memory_s
        if self._begun_s is None and prefill_s > 0.0:
            self._begun_s = now_s

    def mean(self, now_s: float, least_seen: float) -> float:
        """Return the rate; soon after the first prompt over the time since, but over `least_seen` of the memory."""
        if self._begun_s is None:
            return 0.0
        self._fade(now_s)
        seen = 1.0 - math.exp((self._begun_s - now_s) / self._memory_s)
        return self._sum / max(seen, least_seen)

    def surely(self, now_s: float) -> float:
        """Return the rate that prompts which come at random surely have: the seen one, less what chance may add."""
        self._fade(now_s)
        return self._sum - constants.SURE * math.sqrt(self._squares / (2.0 * self._memory_s))

    @property
    def burst_s(self) -> float:
        """Return the mean of the prompts, the long ones counting for more: of the squares by that of the seconds."""
        return self._squares / self._sum if self._sum > 0.0 else 0.0

    def _fade(self, now_s: float) -> None:
        kept = math.exp((self._at_s - now_s) / self._memory_s)
        self._sum *= kept
        self._squares *= kept
        self._at_s = now_s


class Demand:
    """The number of workers in service: `workers`.  `by_memory`: memory alone sets it."""

    def __init__(self, cluster: Cluster, targets: Targets, steps: StepModel, answers: Answers) -> None:
        self.workers = 0
        self.by_memory = False
        self._cluster = cluster
        after_s = cluster.settings.retire_after_s
        self._calm_s = constants.CALM_S if after_s is None else min(constants.CALM_S, after_s)
        self._steps = steps
        self._answers = answers
        self._missed = targets.missed
        self._lasting, self._sudden = PromptRate(constants.MEAN_S), PromptRate(max(targets.ttft_s, constants.BURST_S))
        self._accepted: collections.deque[tuple[float, int]] = collections.deque()  # since the first of `_used`
        self._squares = 0  # of their bytes
        self._used: collections.deque[tuple[float, int]] = collections.deque()
        self._strict: collections.deque[tuple[float, int]] = collections.deque()  # falling

    def accept(self, prefill_s: float, kv_bytes: int) -> None:
        """Note an accepted prompt."""
        for rate in (self._lasting, self._sudden):
            rate.accept(prefill_s, self._cluster.now_s)
        self._accepted.append((self._cluster.now_s, kv_bytes))
        self._squares += kv_bytes * kv_bytes

    def prefilling(self) -> float:
        """Return the seconds of prompts per second, lately."""
        return self._lasting.mean(self._cluster.now_s, constants.LEAST_SEEN)

    def look(self, itl_s: float | None, ahead_s: float, caution: float) -> None:
        """Reckon anew.

        `ahead_s`: how long growth is continued.  `caution`: how much of the prompts' randomness reaches a worker, since
        dispatch levels part of it out.
        """
        cluster = self._cluster
        used_bytes = sum(worker.used_bytes - worker.leaving_bytes for worker in cluster.active.values())
        used_bytes += sum(one.kv_bytes for one in cluster.waiting.requests.values())
        ahead_bytes = used_bytes + self._growth(used_bytes) * ahead_s
        limits = constants.PROMPT_PART, self._missed
        strict_limits = constants.STRICT_PART * constants.PROMPT_PART, constants.STRICT_SLOW_PART * self._missed
        by_time = self._by_time(used_bytes, itl_s, caution, limits)
        strict_by_time = self._by_time(used_bytes, itl_s, caution, strict_limits, by_time)
        memory = self._by_memory(ahead_bytes, constants.MEMORY_PART)
        wanted = max(memory, by_time)
        self._note_strict(max(self._by_memory(ahead_bytes, constants.STRICT_PART), wanted, strict_by_time))
        self.workers = max(wanted, min(self.workers, self._strict[0][1]))
        self.by_memory = memory >= self.workers

    def _note_strict(self, strict: int) -> None:
        now_s, recent = self._cluster.now_s, self._strict
        while recent and recent[-1][1] <= strict:
            recent.pop()
        recent.append((now_s, strict))
        while recent[0][0] < now_s - self._calm_s:
            recent.popleft()

    def _growth(self, used_bytes: int) -> float:
        """Return by how many bytes per second the sum has surely grown lately, if it has.

        Requests come at random: a large one, or some at once, do not say that more will follow.
        """
        now_s, used = self._cluster.now_s, self._used
        if not used or now_s - used[-1][0] >= 1.0:
            used.append((now_s, used_bytes))
        while len(used) > 1 and used[1][0] <= now_s - constants.GROWTH_S:
            used.popleft()
        while self._accepted and self._accepted[0][0] < used[0][0]:
            self._squares -= self._accepted.popleft()[1] ** 2
        grown_bytes = used_bytes - used[0][1] - constants.SURE_GROWTH * math.sqrt(self._squares)
        return max(grown_bytes, 0.0) / max(now_s - used[0][0], constants.LEAST_GROWTH_S)

    def _by_memory(self, kv_bytes: float, part: float) -> int:
        """Return how many workers hold so much; 0 while no worker is known, as no number would do."""
        capacity_bytes = self._cluster.roster.largest_capacity_bytes
        return math.ceil(kv_bytes / (part * capacity_bytes)) if capacity_bytes else 0

    def _by_time(
        self, used_bytes: int, itl_s: float | None, caution: float, limits: tuple[float, float], least: int = 1
    ) -> int:
        """Return the fewest workers, but `least`, within these limits of prompts and of slow answers.

        A burst may end as soon as it came: it asks for the mean pace alone, not that almost no answer is slow.
        """
        count, (prompt_part, slow_part) = len(self._cluster.requests), limits
        if not count:
            return 0
        now_s = self._cluster.now_s
        prefilling = self.prefilling()
        sudden = max(prefilling, self._sudden.surely(now_s))
        workers = max(least, math.ceil(sudden / prompt_part))
        if itl_s is None:
            return workers
        burst_s = caution * self._lasting.burst_s
        while workers < count:
            step_s, share = self._steps.step_s(None, count / workers, used_bytes / workers), prefilling / workers
            keeps_mean = step_s <= itl_s * (1.0 - sudden / workers)
            if keeps_mean and self._answers.slow(step_s, itl_s, share, burst_s) <= slow_part:
                break
            workers += 1
        return workers
