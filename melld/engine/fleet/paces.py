"""Step times of a worker: sums for the scheduler, and the limit of requests that keeps steps fast enough.

Owns the sums of one worker since it was last asked, and its limit.  Pure.
"""

import collections
from statistics import median

from melld.engine.wire.messages import StepDone
from melld.scheduler.events import WorkerPace
from melld.scheduler.steptimes import StepCosts

STEPS = 32
"""Number of steps, all with the present limit, behind each decision."""
ROOM = 0.8
"""Below this share of the target there is room for more requests."""


class PaceMeter:
    """The steps of one worker since the last `take`."""

    def __init__(self) -> None:
        self._steps = 0
        self._step_s = self._decodes = self._kv_bytes = 0.0
        self._prompts = self._prompt_tokens = 0
        self._prefill_s = 0.0

    def stepped(self, done: StepDone, kv_bytes: int, costs: StepCosts | None, prompts_ended: int) -> None:
        """Record a step that ran while requests held `kv_bytes`; `costs`: what the worker's steps cost, if known.

        Of a step with prompts only what it took beyond its decodes counts, so one with decodes tells nothing while the
        costs are unknown.
        """
        if not done.prompt_tokens:
            self._steps += 1
            self._step_s += done.step_s
            self._decodes += done.decodes
            self._kv_bytes += kv_bytes
            return
        if not done.decodes:
            beyond_s = done.step_s
        elif costs is not None:
            beyond_s = max(done.step_s - costs.step_s(done.decodes), 0.0)
        else:
            return
        self._prefill_s += beyond_s
        self._prompt_tokens += done.prompt_tokens
        self._prompts += prompts_ended

    def take(self) -> WorkerPace | None:
        """Return the step times so far and reset; a prompt counts once it is complete.  None: there were no steps."""
        steps, prompts = self._steps, self._prompts
        if not steps and not prompts:
            return None
        mean = 1.0 / steps if steps else 0.0
        pace = WorkerPace(
            step_s=self._step_s * mean,
            decodes=self._decodes * mean,
            kv_bytes=self._kv_bytes * mean,
            prompts=prompts,
            prompt_tokens=self._prompt_tokens if prompts else 0,
            prefill_s=self._prefill_s if prompts else 0.0,
        )
        self._steps = 0
        self._step_s = self._decodes = self._kv_bytes = 0.0
        if prompts:
            self._prompts = self._prompt_tokens = 0
            self._prefill_s = 0.0
        return pace


class Pace:
    """Limit of one worker's concurrent requests, between 1 and `max_slots`.

    A worker whose steps are slower than the target is full, like one without free blocks: its slots are reduced, and
    the scheduler gives it nothing more, or moves requests away.
    (`mell-algorithm`, "Beyond memory": a worker is also full when its median step time exceeds the latency target.)
    """

    def __init__(self, target_s: float, max_slots: int) -> None:
        self.slots = max_slots
        self._target_s = target_s
        self._max_slots = max_slots
        self._steps_s: collections.deque[float] = collections.deque(maxlen=STEPS)

    def stepped(self, step_s: float, running: int) -> int:
        """Record the time of a step of `running` requests; return the new limit.

        Too slow: lower the limit in proportion, to at least one fewer than run now.  With room: raise the limit by a
        fourth if it is reached.
        """
        self._steps_s.append(step_s)
        if len(self._steps_s) < STEPS:
            return self.slots
        middle_s = median(self._steps_s)
        wanted = self.slots
        if middle_s > self._target_s and running > 1:
            wanted = min(running - 1, max(1, int(running * self._target_s / middle_s)))
        elif middle_s < ROOM * self._target_s and running >= self.slots:
            wanted = min(self._max_slots, self.slots + max(1, self.slots // 4))
        elif middle_s < ROOM * self._target_s and self.slots < self._max_slots and running < self.slots // 2:
            wanted = min(self._max_slots, self.slots + 1)
        if wanted != self.slots:
            self.slots = wanted
            self._steps_s.clear()
        return self.slots
