"""Compares a split (some workers prefill, the others decode) with workers that do both.

    prefill worker   is kept busy for 0.7 of its time: prompts come at random, and would queue for long beyond that
    others           decode, and compute what is left of the prompts: P - 0.7 m, shared by n - m
    pace             step / (1 - prompts' part of the time), at the step of the decodes shared by those n - m

P is seconds of prompts per second; of n workers m are prefill workers, none where all are mixed.  A step grows slowly
with its decodes: fewer workers that decode undisturbed keep a tight pace where mixed ones, which prompts interrupt, do
not.  Where the target is three lone steps or more, both carry about as much.  Pure.
"""

import enum
from collections.abc import Callable, Mapping

import msgspec

from melld.ids import WorkerId

PREFILL_PART = 0.7
"""How much of its time a prefill worker should be busy."""


class Role(enum.StrEnum):
    """Role of a worker.  A preference only: if workers of a role have no room, any worker takes the request."""

    MIXED = "mixed"  # does prefill and decodes
    PREFILL = "prefill"  # does prefill and hands requests over after the first token
    DECODE = "decode"  # decodes; does prefill for prompts that fit nowhere else


class RoleSettings(msgspec.Struct, frozen=True):
    """`auto`: the policy may split the workers.  `fixed`: roles that an operator gave instead; others are mixed."""

    auto: bool = False
    fixed: Mapping[WorkerId, Role] = {}


Steps = Callable[[int], float]
"""The seconds of a step of all decodes, shared out evenly over that many workers."""


def pace_s(steps: Steps, workers: int, prefilling: int, prompts: float, handing_s: float = 0.0) -> float:
    """Return the mean time between tokens with this many prefill workers; may be infinite.

    `handing_s`: what each token of a request that is handed over waits for that, in the mean.
    """
    decoding = workers - prefilling
    beside = max(0.0, prompts - PREFILL_PART * prefilling) / decoding
    if beside >= 1.0:
        return float("inf")
    return steps(decoding) / (1.0 - beside) + (handing_s if prefilling else 0.0)


def pressure(
    steps: Steps, workers: int, prefilling: int, prompts: float, target_s: float, handing_s: float = 0.0
) -> float:
    """Return how close the tighter side is to its limit: the pace to its target, or prefill workers to full load."""
    busy = min(prompts / prefilling / PREFILL_PART, 1.0) if prefilling else 0.0
    return max(busy, pace_s(steps, workers, prefilling, prompts, handing_s) / target_s)


def best_split(steps: Steps, workers: int, prompts: float, target_s: float, handing_s: float = 0.0) -> int:
    """Return how many prefill workers give the least pressure."""
    return min(range(workers), key=lambda count: pressure(steps, workers, count, prompts, target_s, handing_s))
