"""Model of the time of a worker's steps: a small table of measured iterations, scaled to other models and cards.

Owns the table `data/latency.csv` (sources beside it) and its interpolation.  Never simulates anything.
"""

import csv
import importlib.resources
import math
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from melld.simulator.catalogue import CARDS, MODELS, Card, Model

Floats = npt.NDArray[np.float64]
FAR_BATCH = 4096  # the last two batch sizes are extrapolated to here


class Latency(Protocol):
    """Interface of a model of a worker's speed."""

    def step_s(self, batch: Floats, context_tokens: Floats) -> Floats:
        """Return the seconds of a decode step, element-wise: requests in the batch, context tokens of all of them."""

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds to compute the keys and values of that many tokens of one request."""


class ConstantLatency(msgspec.Struct, frozen=True):
    """Constant step time and linear prefill, for tests and for comparisons without a machine."""

    decode_step_s: float
    prefill_token_s: float = 0.0

    def step_s(self, batch: Floats, context_tokens: Floats) -> Floats:  # noqa: ARG002
        """Return the constant, in the shape of `batch`."""
        return np.full(batch.shape, self.decode_step_s)

    def prefill_s(self, tokens: float) -> float:
        """Return a time linear in the tokens."""
        return tokens * self.prefill_token_s


class LatencyProfile(msgspec.Struct, frozen=True):
    """Fitted times of one model on one card.  `batches`, `constants_s`, `per_token_s`: decode, shape [points]."""

    model: str
    card: str
    batches: Floats
    constants_s: Floats
    per_token_s: Floats
    prefill_terms_s: tuple[float, float, float]

    def step_s(self, batch: Floats, context_tokens: Floats) -> Floats:
        """See `Latency`."""
        constant: Floats = np.interp(batch, self.batches, self.constants_s)
        slope: Floats = np.interp(batch, self.batches, self.per_token_s)
        return constant + slope * context_tokens

    def prefill_s(self, tokens: float) -> float:
        """See `Latency`."""
        constant, line, square = self.prefill_terms_s
        return constant + (line + square * tokens) * tokens

    def scaled(self, model: Model, card: Card) -> "LatencyProfile":
        """Return the profile scaled to another model and card by what bounds each part of a step."""
        base_model, base_card = MODELS[self.model], CARDS[self.card]
        slower = base_card.bytes_per_s / card.bytes_per_s
        weights = model.weight_bytes / base_model.weight_bytes
        if model.bytes_per_token == base_model.bytes_per_token and abs(weights - 1) < 0.02:
            weights = 1.0
        compute = weights * base_card.operations_per_s / card.operations_per_s
        constant, line, square = self.prefill_terms_s
        return LatencyProfile(
            model.name,
            card.name,
            self.batches,
            self.constants_s * slower * weights,
            self.per_token_s * slower * model.bytes_per_token / base_model.bytes_per_token,
            (constant * compute, line * compute, square * compute),
        )


def profile_for(model: Model, card: Card) -> LatencyProfile:
    """Return the nearest measured profile, scaled to the model and card."""

    def distance(profile: LatencyProfile) -> float:
        base_model, base_card = MODELS[profile.model], CARDS[profile.card]
        return (
            abs(math.log(model.weight_bytes / base_model.weight_bytes))
            + abs(math.log(card.bytes_per_s / base_card.bytes_per_s))
            + 0.1 * abs(math.log(model.bytes_per_token / base_model.bytes_per_token))
        )

    return min(_read_table(), key=distance).scaled(model, card)


def _read_table() -> list[LatencyProfile]:
    text = importlib.resources.files("melld.simulator").joinpath("data/latency.csv").read_text(encoding="utf-8")
    prefill: dict[tuple[str, str], tuple[float, float, float]] = {}
    decode: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for row in csv.DictReader(text.splitlines()):
        key = row["model"], row["card"]
        constant_s, line_s, square_s = (
            float(row[name]) / 1e3 for name in ("constant_ms", "per_token_ms", "per_token_squared_ms")
        )
        if row["phase"] == "prefill":
            prefill[key] = constant_s, line_s, square_s
        else:
            decode.setdefault(key, []).append((int(row["batch"]), constant_s, line_s))
    return [_profile(key, points, prefill[key]) for key, points in decode.items()]


def _profile(
    key: tuple[str, str], points: list[tuple[int, float, float]], prefill: tuple[float, float, float]
) -> LatencyProfile:
    points = sorted(points)
    (before, constant_before_s, _), (last, constant_s, line_s) = points[-2:]
    steps = (FAR_BATCH - last) / (last - before)
    points.append((FAR_BATCH, constant_s + steps * (constant_s - constant_before_s), line_s))
    batches, constants, lines = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    return LatencyProfile(key[0], key[1], batches, constants, lines, prefill)
