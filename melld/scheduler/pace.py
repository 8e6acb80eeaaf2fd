"""The limit of a worker's concurrent requests that keeps its steps fast enough.

Pure.  A worker whose steps are slower than the target is full, like one without free blocks: its slots are reduced, and
the scheduler gives it nothing more, or moves requests away.
(`mell-algorithm`, "Beyond memory": a worker is also full when its median step time exceeds the latency target.)
"""

import collections
from statistics import median

STEPS = 32
"""Number of steps, all with the present limit, behind each decision."""
ROOM = 0.8
"""Below this share of the target there is room for more requests."""


class Pace:
    """Limit of one worker, between 1 and `max_slots`."""

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
