"""Models of a worker's speed, learned from what workers tell: seconds of a step, and of a prompt.

Own least squares with forgetting, one for all workers, and each worker's own factor.  Never decide anything.
"""

from melld.ids import WorkerId
from melld.scheduler.events import WorkerPace
from melld.scheduler.policies.slo import constants
from melld.scheduler.state import Worker
from melld.scheduler.steptimes import fitted, sums_of


class StepModel:
    """Seconds of a step without prompts: base + decodes + bytes of KV that they read."""

    def __init__(self) -> None:
        self._sums = [0.0] * 9
        self._prior: list[tuple[tuple[float, float, float], list[float]]] | None = None
        self._costs = [0.0] * 3
        self._stale = False
        self._factors: dict[WorkerId, float] = {}

    @property
    def known(self) -> bool:
        """Return True once a step was seen."""
        return self._prior is not None

    def observe(self, worker: Worker, pace: WorkerPace) -> None:
        """Learn from a worker's steps."""
        if pace.step_s <= 0.0:
            return
        if self._prior is None:
            self._prior = _prior(pace.step_s, worker.capacity_bytes)
            self._stale = True
        expected_s = self.step_s(None, pace.decodes, pace.kv_bytes)
        if expected_s > 0.0:  # else nothing but decodes cost time so far, and there were none
            factor = self._factors.get(worker.id, 1.0)
            factor += (pace.step_s / expected_s - factor) / constants.PRIOR_WEIGHT
            self._factors[worker.id] = min(max(factor, 1.0 / constants.SLOWEST), constants.SLOWEST)
        keep = 1.0 - 1.0 / constants.PACES_REMEMBERED
        new = sums_of((1.0, pace.decodes, pace.kv_bytes), pace.step_s)
        self._sums = [keep * old + more for old, more in zip(self._sums, new, strict=True)]
        self._stale = True

    def step_s(self, worker: Worker | None, decodes: float, kv_bytes: float) -> float:
        """Return the seconds of a step on the worker (None: on one like the mean); 0 before anything was seen."""
        if self._stale and self._prior is not None:
            self._costs = fitted([sum(column) for column in zip(self._sums, *self._thought(), strict=True)])
            self._stale = False
        base_s, decode_s, byte_s = self._costs
        seconds = base_s + decode_s * decodes + byte_s * kv_bytes
        return seconds if worker is None else seconds * self._factors.get(worker.id, 1.0)

    def _thought(self) -> list[list[float]]:
        """Return the sums of the prior, each of its steps as heavy as one like those that were seen.

        In least squares a step of a batch of 64 is as heavy as a thousand of a batch of two.
        """
        assert self._prior is not None
        found = []
        for row, sums in self._prior:
            weight = 1.0
            for cost, square in ((1, 3), (2, 5)):
                if row[cost] > 1.0 and self._sums[0] > 0.0:
                    weight = min(weight, self._sums[square] / self._sums[0] / row[cost] ** 2)
            found.append([weight * one for one in sums])
        return found

    def lone_step_s(self) -> float:
        """Return the seconds of a step with one request that has hardly begun; 0 before anything was seen."""
        return self.step_s(None, 1.0, 0.0)


def _prior(step_s: float, capacity_bytes: int) -> list[tuple[tuple[float, float, float], list[float]]]:
    """Return what is thought before it was seen, as three steps and their sums: a lone one, a full memory, a batch."""
    full, batch = (1.0, 1.0, float(capacity_bytes)), (1.0, constants.BATCH, 0.0)
    rows = ((1.0, 1.0, 0.0), 1.0), (full, constants.FULL_MEMORY), (batch, constants.FULL_BATCH)
    return [(row, sums_of(row, step_s * times)) for row, times in rows]


class PromptModel:
    """Seconds of a prompt that is computed alone: its own, its tokens', and those of its tokens' squares."""

    def __init__(self) -> None:
        self._sums = [0.0] * 9
        self._costs = [0.0] * 3
        self._stale = False

    def observe(self, pace: WorkerPace) -> None:
        """Learn from a worker's prompts."""
        if not pace.prompts or pace.prefill_s <= 0.0:
            return
        keep = 1.0 - 1.0 / constants.PACES_REMEMBERED
        new = sums_of((pace.prompts, pace.prompt_tokens, pace.prompt_tokens**2 / pace.prompts), pace.prefill_s)
        self._sums = [keep * old + more for old, more in zip(self._sums, new, strict=True)]
        self._stale = True

    def seconds(self, tokens: int) -> float:
        """Return the seconds of one prompt; 0 before any was seen."""
        if self._stale:
            self._costs = fitted([seen + more for seen, more in zip(self._sums, self._thought(), strict=True)])
            self._stale = False
        return self._costs[0] + (self._costs[1] + self._costs[2] * tokens) * tokens

    def _thought(self) -> list[float]:
        """Return the sums of one long prompt as it is thought from those that were seen.

        Short prompts say little of what grows with the square, yet a fit of them alone may lay all their time on it.
        """
        tokens, times = constants.LONG_TOKENS, constants.LONG_TIMES
        grows = (times - 1.0) / tokens
        ones, lines, squares, line_lines, line_squares, square_squares, *values = self._sums
        grown = line_lines + grows * (2.0 * line_squares + grows * square_squares)
        seen = [ones, lines + grows * squares, 0.0, grown, 0.0, 0.0, values[0], values[1] + grows * values[2], 0.0]
        base_s, token_s, _ = fitted(seen)
        return sums_of((1.0, tokens, tokens**2), base_s + token_s * times * tokens)
