"""Whether a split carries more prompts than workers that all do both: some compute prompts, the others decode.

    y               1 - step / target: the part of the time that prompts may take beside decodes of that step
    mixed           P <= n y, at the step of the decodes shared by all n
    split           P <= 0.7 m, while the step of the decodes shared by n - m stays within 0.9 of the target

P is seconds of prompts per second.  Prompts come at random: beyond 0.7 they would queue for long.  A split pays where
the target leaves little beside a step (below about twice a lone one) and the decodes still fit on fewer workers; where
the target is three steps or more, mixed workers carry as much or more.  Pure.
"""

from collections.abc import Callable

PREFILL_PART, DECODE_PART = 0.7, 0.9
"""How busy prompts may keep a prefill worker, and how much of the target a decode worker's steps may take."""

Steps = Callable[[int], float]
"""The seconds of a step of all decodes, shared out evenly over that many workers."""


def mixed_carries(steps: Steps, workers: int, target_s: float) -> float:
    """Return the seconds of prompts per second that the workers can compute if each decodes as well."""
    return workers * max(0.0, 1.0 - steps(workers) / target_s)


def split_carries(steps: Steps, workers: int, prefilling: int, target_s: float) -> float:
    """Return the same if so many only compute prompts, and the others only decode; 0 if those cannot keep the pace."""
    decoding = workers - prefilling
    if decoding < 1 or steps(decoding) > DECODE_PART * target_s:
        return 0.0
    return PREFILL_PART * prefilling


def best_split(steps: Steps, workers: int, target_s: float) -> int:
    """Return how many workers of the split that carries most compute prompts; 0 if mixed workers carry as much."""
    best, most = 0, mixed_carries(steps, workers, target_s)
    for prefilling in range(1, workers):
        if (carried := split_carries(steps, workers, prefilling, target_s)) > most:
            best, most = prefilling, carried
    return best


def least_split(steps: Steps, workers: int, target_s: float, prompts: float) -> int:
    """Return the fewest workers that compute so many prompts beside others that only decode; 0 if no split does."""
    for prefilling in range(1, workers):
        if split_carries(steps, workers, prefilling, target_s) >= max(prompts, 1e-9):
            return prefilling
    return 0
