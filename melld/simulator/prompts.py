"""Orders the prompts of simulated workers and reports their times, as a daemon's workers do.

Owns whose prompt a worker computes first, and the prompts that have not been told yet.  Never says how long one takes.
"""

import collections
from collections.abc import Iterable

from melld.scheduler.events import WorkerPace
from melld.scheduler.targets import Targets
from melld.simulator.latency import Latency
from melld.simulator.run import Run
from melld.simulator.running import Running


class Prompts:
    """Prompts by worker, each reported once it has been computed."""

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


class Turns:
    """The order of the prompts on each worker: those of urgent requests, then those whose first tokens are due first.

    As `engine.worker.residency.budget.DueTimes` has it; without targets only urgent requests overtake others.
    """

    def __init__(self, running: Running, latency: Latency, targets: Targets | None) -> None:
        self._running = running
        self._prefill_s = latency.prefill_s
        self._targets = targets
        self._latest: list[tuple[bool, float]] = []  # turn of the prompts that wait, by worker

    def add_workers(self, count: int) -> None:
        """Add `count` workers without prompts."""
        self._latest += [(False, 0.0)] * count

    def free(self, worker: int) -> None:
        """Note that the worker has computed all its prompts."""
        self._latest[worker] = False, 0.0

    def due_s(self, prompt: int, now_s: float) -> float:
        """Return when the first token of a request that arrives now is due; 0: there are no targets."""
        return now_s + self._targets.first_token_s(self._prefill_s(prompt)) if self._targets is not None else 0.0

    def overtake(self, run: Run, computes_s: float, now_s: float) -> list[Run]:
        """Let the prompt of a request, the last on its worker, take its turn; return those that it overtakes.

        They end later.  `computes_s`: when the worker could begin with it.  Who would be late waits for the others.
        """
        waiting, latest = [], self._latest[run.worker]
        if run.turn < latest:
            waiting = [one for one in self._running.prefilling(run.worker, now_s) if one is not run]
        seconds = self._prefill_s(run.prompt) * self._running.stretch[run.worker]
        if self._targets is not None and self._first_s(run, waiting, computes_s, seconds) > run.turn[1]:
            run.turn = run.turn[0], run.turn[1] + self._targets.later_s(self._prefill_s(run.prompt))
        self._latest[run.worker] = max(latest, run.turn)
        delayed = [one for one in waiting if one.turn > run.turn]
        if delayed:
            first_s = self._first_s(run, waiting, computes_s, seconds)
            run.first_token_s = self._running.since_s[run.row] = first_s
        for one in delayed:
            one.version += 1
            self._running.since_s[one.row] += seconds
            if one.first_token_s > now_s:
                one.first_token_s += seconds
        return delayed

    def _first_s(self, run: Run, waiting: list[Run], computes_s: float, seconds: float) -> float:
        """Return when the request has its first token: at the end of the line, or before those of later turns."""
        before = [self._running.since_s[one.row] for one in waiting if one.turn <= run.turn]
        return run.first_token_s if len(before) == len(waiting) else max([computes_s, *before]) + seconds
