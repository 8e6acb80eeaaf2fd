"""How many workers the load needs: by memory, by prompts, and by the pace of the steps.

    memory    the KV of all requests, with its recent growth continued for one wake, in 94 % of the memory
    prompts   at most 60 % of each worker's time
    pace      the steps of an even share of all requests, beside an even share of the prompts, within the target

Owns the recent history of the load, and the hysteresis: the number rises at once, and falls to the most that stricter
limits asked for in the last 20 seconds.  Never wakes a worker.
"""

import collections
import math

from melld.scheduler.cluster import Cluster
from melld.scheduler.policies.slo.models import StepModel

MEMORY_PART, PROMPT_PART = 0.94, 0.6
STRICT_MEMORY_PART, STRICT_PART = 0.9, 0.9
"""Limits for fewer workers than now: of the memory, and times the other two limits."""
MEAN_S, GROWTH_S, CALM_S = 30.0, 16.0, 20.0


class Demand:
    """The number of workers in service: `workers`.  `by_memory`: memory alone sets it."""

    def __init__(self, cluster: Cluster, steps: StepModel) -> None:
        self.workers = 0
        self.by_memory = False
        self._cluster = cluster
        self._steps = steps
        self._prefilling = 0.0
        self._at_s = 0.0
        self._used: collections.deque[tuple[float, int]] = collections.deque()
        self._strict: collections.deque[tuple[float, int]] = collections.deque()  # falling

    def accept(self, prefill_s: float) -> None:
        """Note an accepted prompt."""
        self._fade()
        self._prefilling += prefill_s / MEAN_S

    def look(self, itl_s: float | None, wake_s: float) -> None:
        """Reckon anew; `itl_s`: the pace to plan for; `wake_s`: how long a new worker takes to compute."""
        cluster = self._cluster
        self._fade()
        count = len(cluster.requests)
        used_bytes = sum(worker.used_bytes - worker.leaving_bytes for worker in cluster.active.values())
        used_bytes += sum(one.kv_bytes for one in cluster.waiting.requests.values())
        ahead_bytes = used_bytes + self._growth(used_bytes) * wake_s
        memory = self._by_memory(ahead_bytes, MEMORY_PART)
        wanted = max(memory, self._by_time(count, used_bytes, itl_s, 1.0))
        strict = self._by_memory(ahead_bytes, STRICT_MEMORY_PART)
        strict = max(strict, wanted, self._by_time(count, used_bytes, itl_s, STRICT_PART))
        self._note_strict(strict)
        self.workers = max(wanted, min(self.workers, self._strict[0][1]))
        self.by_memory = memory >= self.workers

    def _note_strict(self, strict: int) -> None:
        now_s, recent = self._cluster.now_s, self._strict
        while recent and recent[-1][1] <= strict:
            recent.pop()
        recent.append((now_s, strict))
        while recent[0][0] < now_s - CALM_S:
            recent.popleft()

    def _growth(self, used_bytes: int) -> float:
        """Return by how many bytes per second the sum has grown lately, if it has."""
        now_s, used = self._cluster.now_s, self._used
        if not used or now_s - used[-1][0] >= 1.0:
            used.append((now_s, used_bytes))
        while len(used) > 1 and used[1][0] <= now_s - GROWTH_S:
            used.popleft()
        return max(used_bytes - used[0][1], 0) / GROWTH_S

    def _capacity_bytes(self) -> int:
        return self._cluster.largest_capacity_bytes() or 1

    def _by_memory(self, kv_bytes: float, part: float) -> int:
        return math.ceil(kv_bytes / (part * self._capacity_bytes()))

    def _by_time(self, count: int, used_bytes: int, itl_s: float | None, part: float) -> int:
        """Return the fewest workers by prompts and pace, at that part of the limits."""
        if not count:
            return 0
        workers = max(1, math.ceil(self._prefilling / (PROMPT_PART * part)))
        if itl_s is None:
            return workers
        while workers < count:
            step_s = self._steps.step_s(None, count / workers, used_bytes / workers)
            if step_s <= itl_s * part * (1.0 - self._prefilling / workers):
                break
            workers += 1
        return workers

    def _fade(self) -> None:
        now_s = self._cluster.now_s
        self._prefilling *= math.exp((self._at_s - now_s) / MEAN_S)
        self._at_s = now_s
