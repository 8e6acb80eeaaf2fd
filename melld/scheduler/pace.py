"""How many requests a worker may run at once so that its steps do not become too slow.

Owns one worker's limit.  Pure.  A worker whose steps are slower than the target is full, like one without free blocks:
the scheduler is told fewer slots, and gives it nothing more, or moves some away.
(`mell-algorithm`, "Beyond memory": a worker is also full when its median step time exceeds the latency target.)
"""

import collections
from statistics import median

STEPS = 32
"""A judgement is made of so many steps, all of them with the present limit."""
ROOM = 0.8
"""Below this part of the target there is room for more requests."""


class Pace:
    """One worker's limit, between 1 and `max_slots`."""

    def __init__(self, target_s: float, max_slots: int) -> None:
        self.slots = max_slots
        self._target_s = target_s
        self._max_slots = max_slots
        self._steps_s: collections.deque[float] = collections.deque(maxlen=STEPS)

    def stepped(self, step_s: float, running: int) -> int:
        """A step of so many requests took so long.  Returns the limit from now on.

        Too slow: as many as would do at the same time per request, and at least one fewer than run now.  With room: a
        fourth more than the limit, if the limit is what keeps requests away.
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
