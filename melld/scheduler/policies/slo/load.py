"""What a worker has accepted: when its prompts are done, and how much of its time goes into prompts.

Owns one record per active worker.  Never decides where requests go.
"""

import math

from melld.ids import WorkerId
from melld.scheduler.state import Worker

MEMORY_S = 10.0
"""Accepted prompts fade with this time constant."""


class Load:
    """One worker's accepted prompts.  `free_s`: when they are done; at first, when the worker computes."""

    __slots__ = ("_at_s", "_prefilling", "free_s")

    def __init__(self, ready_s: float) -> None:
        self.free_s = ready_s
        self._prefilling = 0.0
        self._at_s = ready_s

    def prefilling(self, now_s: float) -> float:
        """Return the seconds of prompts accepted per second, lately."""
        return self._prefilling * math.exp(min(self._at_s - now_s, 0.0) / MEMORY_S)

    def accept(self, prefill_s: float, ends_s: float, now_s: float) -> None:
        """Note a prompt of so many seconds that will be done then."""
        self._prefilling = self.prefilling(now_s) + prefill_s / MEMORY_S
        self._at_s = max(now_s, self._at_s)
        self.free_s = ends_s


class Loads:
    """The records of the active workers."""

    def __init__(self) -> None:
        self._loads: dict[WorkerId, tuple[int, Load]] = {}

    def of(self, worker: Worker, now_s: float) -> Load:
        """Return the worker's record, anew after each activation."""
        order, load = self._loads.get(worker.id, (None, None))
        if load is None or order != worker.order:
            load = Load(now_s + worker.wake_s)
            self._loads[worker.id] = worker.order, load
        return load
