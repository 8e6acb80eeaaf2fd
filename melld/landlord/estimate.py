"""MuxServe's estimator: the request rate that the models on one device would serve together.

    F(d) = Σ_m min(λ_m, b_m / (Σ_i t_prefill,i + t_d · l_m))        equation 3 of the paper

Steps are added up, as models slice the device's time: t_d = Σ_i p_i · step_i, where p_i is the part of the time in
which the model has requests.  b_m is what KV memory allows; short memory is shared in proportion to what each would
hold.

Rates, lengths and times are means of about `MEAN_S`.
"""

import math
from collections.abc import Iterable, Sequence

from melld.landlord.events import ModelLoad

MEAN_S = 60.0
ROUNDS = 8
"""Rounds of the fixed-point iteration: steps take longer with more models busy, which keeps them busy longer."""


class ModelDemand:
    """Rates, lengths and sizes of one model's requests.  The first guesses hold until a request has ended."""

    def __init__(self) -> None:
        self.rate_per_s = 0.0
        self.output_tokens = 200.0
        self.held_bytes = 0.0
        self.prefill_s = 0.1
        self.step_s = 0.02
        self._requests = 0.0
        self._counted_s = 0.0

    def observe(self, load: ModelLoad | None, passed_s: float) -> None:
        """Learn from the model's last `passed_s` seconds."""
        kept = math.exp(-passed_s / MEAN_S)
        self._requests *= kept
        self._counted_s = self._counted_s * kept + passed_s
        if load is not None:
            self._requests += load.arrivals
            self._learn(load, passed_s)
        self.rate_per_s = self._requests / self._counted_s if self._counted_s else 0.0

    def _learn(self, load: ModelLoad, passed_s: float) -> None:
        if load.ended:
            fresh = 1.0 - math.exp(-load.ended / 16.0)
            self.output_tokens += fresh * (load.output_tokens / load.ended - self.output_tokens)
            known_bytes = self.held_bytes or load.held_bytes / load.ended
            self.held_bytes = known_bytes + fresh * (load.held_bytes / load.ended - known_bytes)
        if load.prompts:
            fresh = 1.0 - math.exp(-load.prompts / 16.0)
            self.prefill_s += fresh * (load.prefill_s / load.prompts - self.prefill_s)
        if load.step_s:
            self.step_s += (1.0 - math.exp(-passed_s / 5.0)) * (load.step_s - self.step_s)


def token_s(demands: Sequence[ModelDemand]) -> float:
    """Return t_d: the mean time between two tokens of a request beside these models."""
    return _round(demands)[0]


def prefill_part(demands: Iterable[ModelDemand]) -> float:
    """Return the part of the device's time that the prompts of these models take."""
    return sum(demand.rate_per_s * demand.prefill_s for demand in demands)


def served_per_s(demands: Sequence[ModelDemand], kv_bytes: int) -> float:
    """Return F: requests a second that the models serve on one device with so much KV memory."""
    step_s, prefill_s = _round(demands)
    served = wanted_bytes = 0.0
    for demand in demands:
        stay_s = prefill_s + step_s * demand.output_tokens
        wanted_bytes += demand.rate_per_s * stay_s * demand.held_bytes
        served += demand.rate_per_s
    return served * min(1.0, max(kv_bytes, 0) / wanted_bytes) if wanted_bytes else served


def _round(demands: Sequence[ModelDemand]) -> tuple[float, float]:
    """Return the seconds of a round of steps, and of a round of prompts."""
    prefill_s = sum(demand.prefill_s for demand in demands)
    step_s = 0.0
    for _ in range(ROUNDS):
        busy = [min(1.0, one.rate_per_s * (prefill_s + step_s * one.output_tokens)) for one in demands]
        step_s = sum(part * demand.step_s for part, demand in zip(busy, demands, strict=True))
    return step_s, prefill_s
