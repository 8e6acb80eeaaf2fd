"""Best fit and worst fit without migration: the baselines that placement alone can reach.

Both place where the request fits and wake a worker only when it fits nowhere.  Neither moves a running request,
except off a worker that an operator drains.
"""

from collections.abc import Iterator
from typing import ClassVar

from melld.scheduler.cluster import Cluster
from melld.scheduler.policy import Policy
from melld.scheduler.state import Request, Worker


def tightest_fit(cluster: Cluster, request: Request) -> Worker | None:
    """The worker that would have the least room left."""
    return _first_fit(cluster, request, cluster.room.tightest(request.kv_bytes))


def roomiest_fit(cluster: Cluster, request: Request) -> Worker | None:
    """The worker that would have the most room left."""
    return _first_fit(cluster, request, cluster.room.roomiest())


def _first_fit(cluster: Cluster, request: Request, workers: Iterator[Worker]) -> Worker | None:
    for worker in workers:
        if worker is not request.worker:
            return worker if cluster.fits(worker, request.kv_bytes) else None
    return None


class BestFit(Policy):
    """The tightest worker that fits."""

    name: ClassVar[str] = "best-fit"

    def allocate(self, request: Request, cause: str) -> bool:
        """See `Policy.allocate`."""
        worker = tightest_fit(self.cluster, request) or self.spare(request.kv_bytes, cause)
        if worker is not None:
            self.cluster.assign(request, worker, cause)
        return worker is not None


class WorstFit(Policy):
    """The roomiest worker."""

    name: ClassVar[str] = "worst-fit"

    def allocate(self, request: Request, cause: str) -> bool:
        """See `Policy.allocate`."""
        worker = roomiest_fit(self.cluster, request) or self.spare(request.kv_bytes, cause)
        if worker is not None:
            self.cluster.assign(request, worker, cause)
        return worker is not None


class MostFree(Policy):
    """The worker with the most free KV of all, asleep or awake: for speed alone, when no GPU is to be kept free."""

    name: ClassVar[str] = "most-free"

    def allocate(self, request: Request, cause: str) -> bool:
        """See `Policy.allocate`."""
        worker = roomiest_fit(self.cluster, request)
        if worker is None or worker.requests or worker.arriving:
            worker = self.spare(request.kv_bytes, cause) or worker
        if worker is not None:
            self.cluster.assign(request, worker, cause)
        return worker is not None
