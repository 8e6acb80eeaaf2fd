"""Best fit and worst fit without migration: the baselines of placement alone.

Both wake a worker only if the request fits nowhere.  Neither moves a running request, except off a draining worker.
"""

from typing import ClassVar

from melld.scheduler.cluster import Cluster
from melld.scheduler.policy import Policy
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request, Worker


def tightest_fit(cluster: Cluster, request: Request) -> Worker | None:
    """Return the worker with room that would have the least left."""
    tightest = cluster.room.tightest(request.kv_bytes)
    return next((worker for worker in tightest if worker is not request.worker), None)


def roomiest_fit(cluster: Cluster, request: Request) -> Worker | None:
    """Return the worker that would have the most room left."""
    for worker in cluster.room.roomiest():
        if worker is not request.worker:
            return worker if cluster.fits(worker, request.kv_bytes) else None
    return None


class BestFit(Policy):
    """Policy: the tightest worker that fits."""

    name: ClassVar[str] = "best-fit"
    fit = staticmethod(tightest_fit)

    def allocate(self, request: Request, reason: Reason) -> bool:
        """See `Policy.allocate`."""
        worker = self.fit(self.cluster, request) or self.spare(request.kv_bytes, reason)
        if worker is not None:
            self.cluster.assign(request, worker, reason)
        return worker is not None


class WorstFit(BestFit):
    """Policy: the roomiest worker."""

    name = "worst-fit"
    fit = staticmethod(roomiest_fit)


class MostFree(Policy):
    """Policy: the worker with the most free KV, asleep or awake: for speed alone, when no GPU needs to stay free."""

    name: ClassVar[str] = "most-free"

    def allocate(self, request: Request, reason: Reason) -> bool:
        """See `Policy.allocate`."""
        worker = roomiest_fit(self.cluster, request)
        if worker is None or worker.requests or worker.arriving:
            worker = self.spare(request.kv_bytes, reason) or worker
        if worker is not None:
            self.cluster.assign(request, worker, reason)
        return worker is not None
