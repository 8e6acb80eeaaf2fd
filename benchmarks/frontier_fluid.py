"""The least that moves can do: workers that grow, ends that free room, and requests that can be cut to any size.

Owns a model of packing without any bin packing in it: what is left of the problem when every request fits everywhere.
A worker's free room shrinks evenly, jumps when one of its requests ends, and is halved with the roomiest worker's when
it has run out: one move.  The oracle knows when the next request of every worker ends, and cuts accordingly.

No policy that moves whole requests should be expected to need fewer moves for the same free room.
"""

import random

SECONDS = 3600.0
STEP_S = 0.1
NEARLY_FULL = 0.01


class Fluid:
    """Sizes are parts of one worker's capacity: `final` of a request at its end, `prompt` at its start, on average."""

    def __init__(self, free: float, workers: int, rate_per_s: float, prompt: float, final: float, seed: int) -> None:
        self._chance = random.Random(seed)
        self._wanted = free * workers
        self._rate_per_s, self._prompt, self._final = rate_per_s, prompt, final
        self._growth_per_s = rate_per_s * (final - prompt) / workers
        self.free = [free] * workers
        self._end_s = [self._next_end_s(0.0) for _ in self.free]
        self._arrival_s = 0.0
        self.requests = self.moves = 0

    def step(self, now_s: float, *, oracle: bool) -> None:
        """Let a tenth of a second pass."""
        free = self.free
        for worker in range(len(free)):
            free[worker] -= self._growth_per_s * STEP_S
            if self._end_s[worker] <= now_s:
                free[worker] += self._size(self._final)
                self._end_s[worker] = self._next_end_s(now_s)
        while self._arrival_s <= now_s:
            self.requests += 1
            self._arrival_s += self._chance.expovariate(self._rate_per_s)
            free[self._roomiest(now_s, oracle=oracle)] -= self._size(self._prompt)
        self._hold(now_s)
        for worker in range(len(free)):
            if free[worker] < 0:
                self._move(worker, now_s, oracle=oracle)

    def _hold(self, now_s: float) -> None:
        """Keep the free room of all near what is wanted: requests end, or come, that nobody counts."""
        if sum(self.free) < 0.7 * self._wanted:
            self.free[self._chance.randrange(len(self.free))] += self._size(self._final)
        elif sum(self.free) > 1.3 * self._wanted:
            self.free[self._roomiest(now_s, oracle=False)] -= self._size(self._prompt)

    def _move(self, worker: int, now_s: float, *, oracle: bool) -> None:
        free = self.free
        giver = self._roomiest(now_s, oracle=oracle)
        needed = self._until_end(worker, now_s) - free[worker]
        spare = free[giver] - self._until_end(giver, now_s)
        if oracle and spare >= needed and free[giver] > NEARLY_FULL:
            given = min(needed + (spare - needed) / 2, free[giver])
        else:
            giver = self._roomiest(now_s, oracle=False)
            given = (free[giver] - free[worker]) / 2
        free[giver] -= given
        free[worker] += given
        self.moves += 1

    def _roomiest(self, now_s: float, *, oracle: bool) -> int:
        """Return the worker with the most free room, now or (the oracle's) when the next of its requests ends."""
        ahead = [self._until_end(worker, now_s) if oracle else 0.0 for worker in range(len(self.free))]
        return max(range(len(self.free)), key=lambda worker: self.free[worker] - ahead[worker])

    def _until_end(self, worker: int, now_s: float) -> float:
        """Return what the worker will grow by before the next of its requests ends."""
        return self._growth_per_s * (self._end_s[worker] - now_s)

    def _next_end_s(self, now_s: float) -> float:
        return now_s + self._chance.expovariate(self._rate_per_s / len(self.free))

    def _size(self, mean: float) -> float:
        return min(self._chance.expovariate(1 / mean), 1.0)


def moves_of_fluid(free: float, workers: int, rate_per_s: float, prompt: float, final: float, *, oracle: bool) -> float:
    """Return the moves per request where the free part of a worker is `free` on average."""
    fluid = Fluid(free, workers, rate_per_s, prompt, final, seed=0)
    for step in range(int(SECONDS / STEP_S)):
        fluid.step(step * STEP_S, oracle=oracle)
    return fluid.moves / fluid.requests
