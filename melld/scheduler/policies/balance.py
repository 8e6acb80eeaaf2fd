"""Load balancing after Llumnix (Sun et al., OSDI 2024): worst fit, then moves from the least to the most free worker.

A worker's freeness is F = (M - sum of V) / B: free bytes per request that shares them, here as a share of the
capacity.  At each epoch workers below one threshold are paired, lowest with highest, with workers above another;
each pair moves its smallest request.
"""

from typing import ClassVar

from melld.scheduler.policies.fit import WorstFit
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Worker

SOURCE_BELOW, DESTINATION_ABOVE = 0.01, 0.04
"""Freeness, in shares of the capacity per request, below which a worker sends and above which one receives."""


class LoadBalance(WorstFit):
    """Worst fit with pairwise balancing at each epoch."""

    name: ClassVar[str] = "load-balance"

    def epoch(self) -> None:
        """Pair the lowest with the highest; one move per pair."""
        ranked = sorted((freeness(worker), worker.order, worker) for worker in self.cluster.active.values())
        for (low, _, source), (high, _, destination) in zip(ranked, reversed(ranked), strict=True):
            if low >= SOURCE_BELOW or high <= DESTINATION_ABOVE:
                return
            request = min(source.movable, key=lambda one: (one.kv_bytes, one.sequence), default=None)
            if request is not None and self.cluster.fits(destination, request.kv_bytes):
                self.cluster.assign(request, destination, Reason.BALANCE)


def freeness(worker: Worker) -> float:
    """Return Llumnix's F over the capacity, with moves in flight counted as done; an empty worker is fully free."""
    staying = worker.count - worker.leaving
    return worker.settled_free_bytes / max(worker.capacity_bytes, 1) / max(staying, 1)
