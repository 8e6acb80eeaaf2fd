"""The queue discipline: which request is placed next, which waits, and which is shed.

Owns no request: `WaitingQueue` has the order, and the policy chooses workers.
"""

from melld.scheduler import events
from melld.scheduler.cluster import Cluster
from melld.scheduler.making_room import Promises, Suspensions
from melld.scheduler.policy import Policy
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Request


class Queueing:
    """Serves one cluster's waiting requests.

    `most`: how many requests that have not begun may wait.  `deadline_s`: how long each of them may.  None: no limit.
    """

    def __init__(self, cluster: Cluster, policy: Policy, most: int | None, deadline_s: float | None) -> None:
        self._cluster = cluster
        self._policy = policy
        self.promises = Promises(cluster, policy)
        self._suspensions = Suspensions(cluster, policy)
        self._most = most
        self._deadline_s = deadline_s

    def allocate(self, request: Request, reason: Reason) -> bool:
        """Let the policy choose among the steady workers, or among all if those have no room."""
        if self._policy.allocate(request, reason):
            return True
        if not self._cluster.unsteady:
            return False
        with self._cluster.last_resort():
            return self._policy.allocate(request, reason)

    def tell(self, request: Request) -> None:
        """Command that the request is queued, if it still waits."""
        if request.id in self._cluster.waiting:
            self._cluster.record(events.QueueRequest(Reason.NO_ROOM, request.id, cause=self._cluster.event))

    def would_shed(self, client: str, priority: int) -> bool:
        """Return True if a request of the client would be shed now because the queue is full."""
        most, waiting = self._most, self._cluster.waiting
        return (
            most is not None
            and waiting.newcomers >= most
            and waiting.would_be_last(client, priority, self._cluster.now_s)
        )

    def shed_surplus(self) -> None:
        """Shed requests that have not begun until the queue is within its limit."""
        most, waiting = self._most, self._cluster.waiting
        while most is not None and waiting.newcomers > most:
            self._shed(waiting.last(self._cluster.now_s), Reason.QUEUE_FULL)

    def shed_late(self) -> None:
        """Shed requests that have waited too long and have not begun.  Never end a begun stream for lack of room."""
        if (deadline_s := self._deadline_s) is None:
            return
        now_s = self._cluster.now_s
        late = [one for one in self._cluster.waiting if now_s - one.arrived_s >= deadline_s]
        for request in late:
            self._shed(request, Reason.WAITED_TOO_LONG)
        if late:
            self.serve()  # one of them may have blocked others that fit

    def _shed(self, request: Request, reason: Reason) -> None:
        self._cluster.remove_request(request)
        self._cluster.record(events.ShedRequest(reason, request.id, cause=self._cluster.event))

    def serve(self) -> None:
        """Place waiting requests strictly in order.

        Pass over only requests that no worker could hold even if empty, and one for which room is being made.
        """
        try:
            self._serve_in_order()
        finally:  # if a policy fails over one request, the others must not miss their turn
            self._cluster.waiting.restore()
        for request in self._suspensions.take_untold():
            self.tell(request)

    def _serve_in_order(self) -> None:
        waiting = self._cluster.waiting
        if (due := self.promises.due()) is not None and not self.allocate(due, Reason.ROOM):
            waiting.pass_over(due.id)
            self.promises.keep()
        while (name := waiting.head(self._cluster.now_s)) is not None:
            request = self._cluster.requests[name]
            if self._policy.too_late(request):
                self._shed(request, Reason.TOO_LATE)
                continue
            has_hope = self._cluster.could_hold(request.kv_bytes)  # else the policy need not look
            if has_hope and self.allocate(request, Reason.ROOM):
                continue
            if has_hope and not self.promises.made(request):
                if self._suspensions.made(request) and self.allocate(request, Reason.ROOM):
                    continue
                break
            waiting.pass_over(name)
