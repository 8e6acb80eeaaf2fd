"""Makes room for the queue's head: by moves for a large request, by a suspension for a high one.

A promise: room that moves make on a worker is kept for the large head of the line.

    none ─made─► standing ─► none      placed, gone, too many of its moves aborted, `MOST_S` over,
                                       or behind a request of its priority that lost its worker

Meanwhile others may pass it, into any other room.  At most one stands at a time.

A suspension: a low request gives up its room to a high one, and resumes later from its tokens.  The last resort: nobody
can be woken and no hole can be made.  A request is suspended `MOST_SUSPENSIONS` times, `APART_S` apart, and then waits
ahead of all newcomers of its priority.

Owns the promise, when it ends, when a suspension is due, and who is suspended.  The policy plans the hole
(`Policy.hole`).
"""

from melld.ids import RequestId
from melld.scheduler import events
from melld.scheduler.cluster import Cluster
from melld.scheduler.policy import Policy
from melld.scheduler.priorities import LOW, class_of
from melld.scheduler.reasons import Reason
from melld.scheduler.state import Duty, Request, RequestState, Worker

MOST_PROMISES, MOST_S = 2, 5.0
"""To one request, each for so long: after that nobody passes it any more."""
MOST_ABORTED = 3
MOST_SUSPENSIONS, APART_S = 2, 10.0
LOOK_S = 0.1
"""A hole, or whom to suspend, is looked for so often."""


class Promises:
    """The promise of one cluster."""

    def __init__(self, cluster: Cluster, policy: Policy) -> None:
        self._cluster = cluster
        self._policy = policy
        self._request: Request | None = None
        self._worker: Worker | None = None
        self._until_s = self._next_look_s = 0.0
        self._leavers: set[RequestId] = set()
        self._aborted = 0

    def made(self, request: Request) -> bool:
        """Start making room for the waiting request and promise it, if that is possible in time."""
        cluster, hole_s = self._cluster, self._cluster.settings.priorities.hole_s
        now_s, instant = cluster.now_s, cluster.settings.instant_moves
        if not hole_s or instant or self._request is not None or now_s < self._next_look_s:
            return False
        if request.promises >= MOST_PROMISES:
            return False
        self._next_look_s = now_s + LOOK_S
        hole = None if cluster.sleeping(request.kv_bytes) is not None else self._policy.hole(request, hole_s)
        if hole is None:
            return False
        worker, plan = hole
        for leaver, taker in plan:
            cluster.assign(leaver, taker, Reason.MAKE_ROOM, hole_s)
        cluster.promise(worker, request.kv_bytes)
        cluster.record(
            events.PromiseRoom(Reason.MAKE_ROOM, request.id, worker.id, request.kv_bytes, cause=cluster.event)
        )
        request.promises += 1
        self._request, self._worker, self._until_s = request, worker, now_s + MOST_S
        self._leavers, self._aborted = {leaver.id for leaver, _ in plan}, 0
        return True

    def due(self) -> Request | None:
        """Return the promised request with its room opened to it; end an expired promise."""
        request, worker = self._request, self._worker
        if request is None or worker is None:
            return None
        is_alive = self._cluster.workers.get(worker.id) is worker
        if is_alive:
            self._cluster.promise(worker, 0)
        waits = request.state is RequestState.WAITING and self._cluster.requests.get(request.id) is request
        lasts = self._cluster.now_s <= self._until_s and self._aborted < MOST_ABORTED
        has_room = is_alive and worker.state is Duty.ACTIVE and request.kv_bytes <= worker.capacity_bytes
        if waits and lasts and has_room and self._cluster.waiting.goes_first(request):
            return request
        self._request = self._worker = None
        return None

    def keep(self) -> None:
        """Close the room again, as the request that `due` returned was not placed."""
        assert self._request is not None
        assert self._worker is not None
        self._cluster.promise(self._worker, self._request.kv_bytes)

    def aborted(self, request: RequestId) -> None:
        """Count the aborted move if the promise needs it."""
        self._aborted += request in self._leavers


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
        has_hole = may_be_promised and self._policy.hole(request, priorities.hole_s) is not None
        found = [] if has_hole else self._sufficient(request)
        fewest = min(found, key=lambda one: (one[0].kv_bytes, one[0].sequence), default=None)
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
        """Return the low requests whose suspension is allowed and frees enough room, each with its worker."""
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
        if class_of(request.priority) != LOW or not request.is_movable or request.suspensions >= MOST_SUSPENSIONS:
            return False
        return not request.suspensions or self._cluster.now_s - request.suspended_s >= APART_S
