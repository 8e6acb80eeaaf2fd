"""Judges how requests were served: which met the targets, and the fewest GPU-seconds that any schedule needs.

Owns the definitions of attainment, goodput and the common bound.  Works on the times of ended requests alone.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from melld.scheduler.targets import MEAN_OVER_TOKENS
from melld.simulator.latency import Latency
from melld.simulator.running import Floats
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload

WARM_UP_S = 60.0
"""Arrivals before this time do not count for the attainment: the first workers are still waking."""

Flags = npt.NDArray[np.bool_]


class AttainedShares(msgspec.Struct, frozen=True):
    """Shares of the requests that met the targets; `served`: how many of all met both.  None: there are no targets."""

    both: float | None = None
    ttft: float | None = None
    itl: float | None = None
    served: int | None = None


def attainment(settings: SimulatorSettings, load: Workload, first_s: Floats, end_s: Floats) -> AttainedShares:
    """Judge every request by its times, shape [requests]; NaN: it was refused or shed, which counts as missed."""
    targets, latency = settings.targets, settings.latency
    if targets is None:
        return AttainedShares()
    arrived_s, output = np.array(load.arrival_s), np.array(load.output_tokens)
    allowed_s = np.array([targets.first_token_s(latency.prefill_s(tokens)) for tokens in load.prompt_tokens])
    in_time: Flags = first_s - arrived_s <= allowed_s
    paced: Flags = ~np.isnan(end_s)
    if targets.itl_s is not None:
        paced = (end_s - first_s) / np.maximum(output - 1, MEAN_OVER_TOKENS) <= targets.itl_s
    counted = arrived_s >= WARM_UP_S
    if not counted.any():
        counted[:] = True

    def share(met: Flags) -> float:
        return float(met[counted].mean())

    return AttainedShares(share(in_time & paced), share(in_time), share(paced), int((in_time & paced).sum()))


def bound_gpu_s(settings: SimulatorSettings, load: Workload) -> float:
    """Return GPU-seconds that no schedule can go below, from the load and the machine alone.

    The largest of: memory (a request holds its prompt while that is computed, and half of its answer in the mean while
    it decodes alone), compute (prompts, and the smallest share of a step that a batch within the target gives), and
    presence (while any request is there, one GPU is).
    """
    targets, latency = settings.targets, settings.latency
    arrived_s, output = np.array(load.arrival_s), np.array(load.output_tokens, dtype=np.float64)
    prompt = np.array(load.prompt_tokens, dtype=np.float64)
    prefill_s = np.array([latency.prefill_s(tokens) for tokens in load.prompt_tokens])
    context = prompt + output / 2
    decode_s = output * latency.step_s(np.ones(len(load)), context)
    memory_s = float((prompt * prefill_s + decode_s * context).sum() * settings.bytes_per_token)
    share_s, slope_s = _best_batch(latency, settings.slots, None if targets is None else targets.itl_s)
    compute_s = float((prefill_s + output * (share_s + slope_s * context)).sum())
    presence_s = union_s(arrived_s, arrived_s + prefill_s + decode_s)
    return max(memory_s / settings.capacity_bytes, compute_s, presence_s)


def union_s(begin_s: Floats, end_s: Floats) -> float:
    """Return how long at least one of the intervals lasts; `begin_s` ascends."""
    latest_s = np.maximum.accumulate(end_s)
    covered_s = np.concatenate(([-np.inf], latest_s[:-1]))
    return float(np.maximum(end_s - np.maximum(begin_s, covered_s), 0.0).sum())


def _best_batch(latency: Latency, slots: int, itl_s: float | None) -> tuple[float, float]:
    """Return the least seconds of a step per request, and per token of context, over the batches within the target."""
    batch: Floats = np.linspace(1.0, slots, slots)
    long: Floats = np.full(slots, 1e4)
    step_s = latency.step_s(batch, 0.0 * long)
    slope_s = latency.step_s(batch, long) - step_s
    within = step_s <= (np.inf if itl_s is None else itl_s)
    within[0] = True  # a target that no step meets: no batch at all is no bound
    return float((step_s / batch)[within].min()), float(slope_s[within].min()) / 1e4
