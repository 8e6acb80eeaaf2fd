"""Tells what the steps of simulated workers took, as a daemon's workers would measure and tell it.

Owns the prompts that have not been told yet.  Never slows or speeds anything up.
"""

import collections
from collections.abc import Iterable

from melld.scheduler.events import WorkerPace
from melld.simulator.running import Running


class Prompts:
    """Prompts by worker, each told once it has been computed."""

    def __init__(self, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._begun: dict[int, collections.deque[tuple[float, int, float]]] = collections.defaultdict(collections.deque)

    def begun(self, worker: int, end_s: float, tokens: int, seconds: float) -> None:
        """Note a prompt that will be computed at `end_s`, and would take these seconds alone."""
        self._begun[worker].append((end_s, tokens, seconds))

    def take(self, running: Running, awake: Iterable[int], now_s: float) -> dict[int, WorkerPace]:
        """Return what was computed since the last call."""
        step_s, batch, context = running.steps
        paces = {}
        for index in sorted(awake):
            prompts = tokens = 0
            prefill_s = 0.0
            begun = self._begun[index]
            while begun and begun[0][0] <= now_s:
                _, more, seconds = begun.popleft()
                prompts, tokens, prefill_s = prompts + 1, tokens + more, prefill_s + seconds
            decodes = float(batch[index]) if index < len(batch) else 0.0
            if decodes:
                steps = float(step_s[index]), decodes, float(context[index]) * self._bytes_per_token
                paces[index] = WorkerPace(*steps, prompts, tokens, prefill_s)
            elif prompts:
                paces[index] = WorkerPace(0.0, 0.0, 0.0, prompts, tokens, prefill_s)
        return paces
