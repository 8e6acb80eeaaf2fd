"""Splitwise's measure of a service: how much slower requests are than each alone on a worker."""

import msgspec
import numpy as np
import numpy.typing as npt

from melld.simulator.measures import Measures
from melld.simulator.running import Floats
from melld.simulator.service import WARM_UP_S

Flags = npt.NDArray[np.bool_]
SLOWDOWN_LIMITS = {"ttft": (2.0, 3.0, 6.0), "tbt": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
"""Splitwise's nine SLOs (its Table VI): slow-down against the request alone, at the 50th, 90th and 99th percentile."""


class Slowdowns(msgspec.Struct, frozen=True):
    """Slow-downs of the first token, of the mean time between tokens and of the whole answer: p50, p90, p99."""

    ttft: tuple[float, ...]
    tbt: tuple[float, ...]
    e2e: tuple[float, ...]

    @property
    def missed(self) -> list[str]:
        """Return the names of the SLOs that are not kept."""
        found = []
        for name, limits in SLOWDOWN_LIMITS.items():
            values = zip((50, 90, 99), getattr(self, name), limits, strict=True)
            found += [f"{name} p{part}" for part, value, limit in values if not value <= limit]
        return found


def slowdowns(measures: Measures) -> Slowdowns:
    """Return how much slower than alone on a worker the requests were; one that was refused is infinitely slow."""
    load, latency = measures.workload, measures.settings.latency
    first_s, end_s = np.array(measures.first_token_s), np.array(measures.end_times_s)
    arrived_s, output = np.array(load.arrival_s), np.array(load.output_tokens, dtype=np.float64)
    prompt = np.array(load.prompt_tokens, dtype=np.float64)
    alone_first_s = np.array([latency.prefill_s(tokens) for tokens in load.prompt_tokens])
    alone_step_s = latency.step_s(np.ones(len(load)), prompt + output / 2)
    more = np.maximum(output - 1, 1)
    slow = (
        (first_s - arrived_s) / alone_first_s,
        (end_s - first_s) / more / alone_step_s,
        (end_s - arrived_s) / (alone_first_s + (output - 1) * alone_step_s),
    )
    counted = arrived_s >= WARM_UP_S
    kept = (counted, counted & (output > 1), counted)

    def parts(values: Floats, which: Flags) -> tuple[float, ...]:
        chosen = np.nan_to_num(values[which], nan=np.inf)
        return tuple(np.percentile(chosen, (50, 90, 99), method="higher").tolist()) if chosen.size else ()

    return Slowdowns(*(parts(values, which) for values, which in zip(slow, kept, strict=True)))
