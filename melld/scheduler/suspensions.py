"""Suspension: a low request gives up its room to a high one at the head of the line, and resumes later from its tokens.

The last resort: nobody can be woken and no hole can be made.  A request is suspended `MOST` times, `APART_S` apart, and
then waits ahead of all newcomers of its priority.  Owns when a suspension is due, and who is suspended.
"""

from melld.ids import RequestId
from melld.scheduler.cluster import Cluster
from melld.scheduler.policy import Policy
from melld.scheduler.priorities import LOW, class_of
from melld.scheduler.promises import LOOK_S, MOST_PROMISES
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request, Worker

MOST = 2
APART_S = 10.0


class Suspensions:
    """The suspensions of one cluster."""

    def __init__(self, cluster: Cluster, policy: Policy) -> None:
        self._cluster = cluster
        self._policy = policy
        self._untold: list[RequestId] = []
        self._next_look_s = 0.0

    def made(self, request: Request) -> bool:
        """Suspend one low request if that makes room for the waiting high one, which is high by its own class."""
        cluster, priorities = self._cluster, self._cluster.settings.priorities
        if not (priorities.suspend and request.urgent) or cluster.settings.instant_moves:
            return False
        if cluster.now_s < self._next_look_s:
            return False
        if cluster.sleeping(request.kv_bytes) is not None or not self._policy.suspends(request):
            return False
        may_be_promised = priorities.hole_s and request.promises < MOST_PROMISES
        if may_be_promised and self._policy.hole(request, priorities.hole_s) is not None:
            return False
        fewest = min(self._sufficient(request), key=lambda one: (one[0].kv_bytes, one[0].sequence), default=None)
        if fewest is None:
            self._next_look_s = cluster.now_s + LOOK_S
            return False
        suspended, worker = fewest
        cluster.suspend(suspended, Reason.MAKE_ROOM)
        self._policy.departed(suspended, worker, None)
        self._untold.append(suspended.id)
        return True

    def take_untold(self) -> list[Request]:
        """Return the requests suspended since the last call."""
        untold, self._untold = self._untold, []
        return [self._cluster.requests[name] for name in untold]

    def _sufficient(self, request: Request) -> list[tuple[Request, Worker]]:
        """Return the low requests that may be suspended and leave enough room, each with its worker."""
        cluster = self._cluster
        found = []
        for worker in cluster.active.values():
            if worker.wake_s or worker.count > worker.slots:
                continue
            need_bytes = request.kv_bytes - cluster.room_bytes(worker)
            found += [
                (one, worker)
                for one in worker.requests.values()
                if self._may_leave(one) and worker.frees_bytes(one.kv_bytes) >= need_bytes
            ]
        return found

    def _may_leave(self, request: Request) -> bool:
        if class_of(request.priority) != LOW or not request.is_movable or request.suspensions >= MOST:
            return False
        return not request.suspensions or self._cluster.now_s - request.suspended_s >= APART_S
