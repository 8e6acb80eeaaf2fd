"""The interface between the scheduler, which is the same for all, and a policy, which decides who goes where.

A policy asks the `Cluster` and decides through its `activate` and `assign`; it records no commands itself and never
changes a size or a state.  One policy object serves one model.  Only `allocate` is required:

    allocate   a waiting request needs a worker, or a running one must leave its worker
    departed   a request has ended and its bytes are free
    grew       sizes have changed (the Cluster has them)
    moved      a move has committed or was aborted
    changed    a worker joined, left, or holds more or less than before
    epoch      the period of re-planning begins
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from melld.ids import RequestId
from melld.scheduler.cluster import Cluster
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request, Worker


class Policy(ABC):
    """Decides placements and moves for one cluster."""

    name: ClassVar[str]

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @abstractmethod
    def allocate(self, request: Request, reason: Reason) -> bool:
        """Assign the request to a worker other than its own, waking one if need be; False if none has room.

        A waiting request (`request.worker is None`) is thereby placed, a running one moved.  Other requests may be
        moved in the same breath.  False must leave the request as it was.
        """

    def send(self, request: Request, worker: Worker, reason: Reason) -> None:
        """An operator has decided: the running request goes there, where it fits.  It is `pinned` already."""
        self.cluster.assign(request, worker, reason)

    def hold(self, request: Request) -> None:  # noqa: B027
        """An operator has decided: the running request stays where it is.  It is `pinned` already."""

    def departed(self, request: Request, worker: Worker, destination: Worker | None) -> None:  # noqa: B027
        """The request has ended; neither `worker`, which ran it, nor the destination of its move counts it now."""

    def grew(self, kv_bytes: dict[RequestId, int]) -> None:  # noqa: B027
        """These requests may have grown; the names may be of requests long gone, the Cluster has the true sizes."""

    def moved(self, request: Request, source: Worker, destination: Worker) -> None:  # noqa: B027
        """A move has ended: `request.worker` is `destination` if it committed and `source` if it was aborted.

        Also called when the destination dies, and when the source dies (`request.worker` is None: it waits).
        Not called for instant moves, which end as they are decided.
        """

    def changed(self, worker: Worker, displaced: list[Request]) -> None:  # noqa: B027
        """The worker came up, went down (it is no longer in `cluster.workers`; `displaced` wait), or changed."""

    def epoch(self) -> None:  # noqa: B027
        """Judge overloads, carry out what was batched.  Empty workers are retired afterwards."""

    def spare(self, kv_bytes: int, reason: Reason) -> Worker | None:
        """Wake a sleeping worker that is large enough; None if there is none."""
        worker = self.cluster.sleeping(kv_bytes)
        if worker is not None:
            self.cluster.activate(worker, reason)
        return worker
