"""Interface between the scheduler, which all policies share, and a policy, which decides where requests go.

A policy queries the `Cluster` and decides through its `activate` and `assign`; it records no commands itself and never
changes a size or a state.  One policy object serves one model.  Only `allocate` is required.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from melld.ids import RequestId
from melld.scheduler.cluster import Cluster
from melld.scheduler.events import RequestFinished, WorkerPace
from melld.scheduler.reasons import Reason
from melld.scheduler.roles import Role
from melld.scheduler.state import Request, Worker


class Policy(ABC):
    """Base of the policies: placements and moves for one cluster."""

    name: ClassVar[str]

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @abstractmethod
    def allocate(self, request: Request, reason: Reason) -> bool:
        """Assign the request to a worker other than its own, waking one if needed; return False if none has room.

        This places a waiting request (`request.worker is None`) and moves a running one.  Other requests may move too.
        After False the request must be unchanged.
        """

    def send(self, request: Request, worker: Worker, reason: Reason) -> None:
        """Move the running, already `pinned` request to a worker where it fits, for an operator."""
        self.cluster.assign(request, worker, reason)

    def hold(self, request: Request) -> None:  # noqa: B027
        """Keep the running, already `pinned` request where it is, for an operator."""

    def departed(self, request: Request, worker: Worker, destination: Worker | None) -> None:  # noqa: B027
        """React to the end of a request; neither `worker`, which ran it, nor its move's destination counts it now."""

    def served(self, request: Request, event: RequestFinished) -> None:  # noqa: B027
        """React to how an ended request was served; called after `departed`."""

    def grew(self, kv_bytes: dict[RequestId, int]) -> None:  # noqa: B027
        """React to growth; names may be of requests long gone, and the Cluster has the true sizes."""

    def moved(self, request: Request, source: Worker, destination: Worker) -> None:  # noqa: B027
        """React to the end of a move: `request.worker` is `destination` if it committed, `source` if it was aborted.

        Also called when the destination dies, and when the source dies (`request.worker` is None: it waits).  Not
        called for instant moves.
        """

    def changed(self, worker: Worker) -> None:  # noqa: B027
        """React to a worker that came up, went down (it has left `cluster.workers`; its requests wait), or changed."""

    def epoch(self) -> None:  # noqa: B027
        """Handle overloads and carry out batched moves.  The scheduler retires empty workers afterwards."""

    def paced(self, paces: dict[Worker, WorkerPace]) -> None:  # noqa: B027
        """React to the workers' step times."""

    def too_late(self, request: Request) -> bool:  # noqa: ARG002
        """Return True if the waiting request should be shed, because it can no longer be served in time."""
        return False

    def hole(self, request: Request, most_s: float) -> tuple[Worker, list[tuple[Request, Worker]]] | None:  # noqa: ARG002
        """Return a worker, and moves from there of `most_s` in all that make room for the waiting request; or None."""
        return None

    def suspends(self, request: Request) -> bool:  # noqa: ARG002
        """Return True if the waiting request would surely be placed once a suspension has made room."""
        return False

    def sleeps_in_s(self, worker: Worker) -> float:
        """Return in how many seconds the idle worker may sleep, if nothing changes; infinite: never."""
        return (self.cluster.settings.retire_after_s or 0.0) - (self.cluster.now_s - worker.empty_since_s)

    def role_of(self, worker: Worker) -> Role:  # noqa: ARG002
        """Return the worker's role."""
        return Role.MIXED

    def roles_because(self) -> str:
        """Say why the workers have their roles; nothing where none are wanted."""
        wanted = self.cluster.settings.roles
        return f"{self.name} gives none" if wanted.auto or wanted.fixed else ""

    def spare(self, kv_bytes: int, reason: Reason) -> Worker | None:
        """Wake and return a sleeping worker that is large enough; None if there is none."""
        worker = self.cluster.sleeping(kv_bytes)
        if worker is not None:
            self.cluster.activate(worker, reason)
        return worker
