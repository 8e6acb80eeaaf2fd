"""A worker's step times by what steps compute, learned from the steps themselves.

    step seconds = base + decode * decoding requests + prompt token * prompt tokens

Pure: the worker, the daemon and the simulator run the same code.  Owns the sums of least squares.  Old steps are
forgotten, as times change with the length of the requests; those with and those without prompt tokens each by steps
of their own kind, so that hours of decoding do not make a worker forget what a prompt costs.
"""

import itertools

import msgspec

LEAST_STEPS = 32
"""There is no fit before so many steps."""
REMEMBERED_STEPS = 64
"""A step's weight falls to 1/e after so many later ones of its kind."""
REFIT_STEPS = 8
"""A fit stands for so many steps: it takes a tenth of a millisecond."""
LEAST_TOKENS = 64
"""A prompt is never given less per step, however tight the target: it must end."""
RIDGE = 1e-4
"""Relative pull to zero, which shares out what steps alike in everything cannot tell apart."""
REACH = 2
"""A fit says nothing of more than so many times the prompt tokens that it has seen in one step."""

_SUPPORTS = [columns for size in (3, 2, 1) for columns in itertools.combinations(range(3), size)]


class StepCosts(msgspec.Struct, frozen=True):
    """The seconds of an empty step, and what each decoding request and each prompt token add."""

    base_s: float
    decode_s: float
    prompt_token_s: float

    def step_s(self, decodes: float, prompt_tokens: float = 0.0) -> float:
        """Return the seconds of a step."""
        return self.base_s + self.decode_s * decodes + self.prompt_token_s * prompt_tokens

    def prompt_tokens_within(self, target_s: float, decodes: float) -> float:
        """Return the prompt tokens that a step of `target_s` has time for, at least `LEAST_TOKENS`; may be infinite."""
        left_s = target_s - self.step_s(decodes)
        if left_s > LEAST_TOKENS * self.prompt_token_s:
            return left_s / self.prompt_token_s if self.prompt_token_s else float("inf")
        return float(LEAST_TOKENS)


class StepTimes:
    """The steps of one worker, and their fit."""

    def __init__(self) -> None:
        self.steps = 0
        self._decoding = [0.0] * 9
        self._mixed = [0.0] * 9
        self._most_prompt_tokens = 0
        self._costs: StepCosts | None = None

    def stepped(self, step_s: float, decodes: int, prompt_tokens: int) -> None:
        """Record a step; ignore an empty one."""
        if step_s <= 0.0 or not (decodes or prompt_tokens):
            return
        self.steps += 1
        self._most_prompt_tokens = max(self._most_prompt_tokens, prompt_tokens)
        expected_s = self._costs.step_s(decodes, prompt_tokens) if self._costs is not None else 0.0
        new = sums_of((1.0, decodes, prompt_tokens), step_s, expected_s)
        sums, keep = self._mixed if prompt_tokens else self._decoding, 1.0 - 1.0 / REMEMBERED_STEPS
        sums[:] = [keep * value + added for value, added in zip(sums, new, strict=True)]
        if self.steps % REFIT_STEPS == 0:
            self._costs = None

    @property
    def costs(self) -> StepCosts | None:
        """Return a recent non-negative fit; None before `LEAST_STEPS`."""
        if self._costs is None and self.steps >= LEAST_STEPS:
            self._costs = StepCosts(
                *fitted([one + other for one, other in zip(self._decoding, self._mixed, strict=True)])
            )
        return self._costs

    def prompt_tokens_within(self, target_s: float, decodes: int) -> int | None:
        """Return how many prompt tokens a step of `target_s` may compute beside the decodes; None without a fit."""
        if (costs := self.costs) is None:
            return None
        seen = max(LEAST_TOKENS, REACH * self._most_prompt_tokens)
        return int(min(costs.prompt_tokens_within(target_s, decodes), seen))


_PAIRS = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]


def sums_of(row: tuple[float, float, float], value: float, expected: float = 0.0) -> list[float]:
    """Return what one observation adds to the sums: the products of `_PAIRS`, and those with the value.

    Errors count relative to the larger of value and expectation, so that no outlier is believed.
    """
    one, two, three = row
    weight = max(value, expected) ** -2
    first, second, third = weight * one, weight * two, weight * three
    pairs = first * one, first * two, first * three, second * two, second * three, third * three
    return [*pairs, first * value, second * value, third * value]


def fitted(sums: list[float]) -> list[float]:
    """Return the non-negative least squares solution, trying each set of positive costs, the full one first."""
    matrix = [[0.0] * 3 for _ in range(3)]
    for (i, j), value in zip(_PAIRS, sums[:6], strict=True):
        matrix[i][j] = matrix[j][i] = value
    scale = [matrix[i][i] ** -0.5 if matrix[i][i] > 0.0 else 0.0 for i in range(3)]
    for i, j in itertools.product(range(3), repeat=2):
        matrix[i][j] *= scale[i] * scale[j] * (1.0 + RIDGE * (i == j))
    right = [value * factor for value, factor in zip(sums[6:], scale, strict=True)]
    best, gain = [0.0] * 3, 0.0
    for support in _SUPPORTS:
        if all(scale[i] for i in support):
            found = _solved([[matrix[i][j] for j in support] + [right[i]] for i in support])
            reached = sum(right[i] * value for i, value in zip(support, found, strict=True))
            if min(found) >= 0.0 and reached > gain:
                best, gain = [0.0] * 3, reached
                for i, value in zip(support, found, strict=True):
                    best[i] = value
            if min(found) >= 0.0 and len(support) == 3:
                break  # least of all, so least among these
    return [value * factor for value, factor in zip(best, scale, strict=True)]


def _solved(rows: list[list[float]]) -> list[float]:
    """Return the solution of a positive definite system; each row ends with its right side."""
    size = len(rows)
    for i in range(size):
        pivot = rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(size):
            if j != i:
                rows[j] = [value - rows[j][i] * own for value, own in zip(rows[j], pivot, strict=True)]
    return [row[size] for row in rows]
