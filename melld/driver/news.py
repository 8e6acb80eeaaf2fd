"""Tells the scheduler before each epoch what the workers have reported: sizes, preemptions, and what steps took.

Owns which requests are known to be preempted.  Decides nothing.
"""

from collections.abc import Callable

from melld.engine.fleet.fleet import Fleet
from melld.ids import RequestId
from melld.scheduler import events
from melld.scheduler.view import ClusterView

PACES_EVERY_S = 0.5


class News:
    """The reports of one fleet since the last epoch.  `tell` takes events for the scheduler."""

    def __init__(
        self,
        fleet: Fleet,
        cluster: ClusterView,
        clock: Callable[[], float],
        tell: Callable[[events.AnyEvent], None],
    ) -> None:
        self.preemptions = 0
        self._fleet = fleet
        self._cluster = cluster
        self._clock = clock
        self._tell = tell
        self._preempted: set[RequestId] = set()
        self._paced_s = 0.0

    def tell(self) -> None:
        """Report everything that is new."""
        self._preemptions()
        self._sizes()
        self._paces()

    def _sizes(self) -> None:
        """Tell the scheduler what has grown, then how much of the known sizes is shared."""
        grown = self._news(self._fleet.reports.take_grown())
        if grown:
            self._tell(events.RequestsGrew(self._clock(), kv_bytes=grown))
        for worker in list(self._cluster.workers.values()):
            shared_bytes = min(self._fleet.reports.shared_bytes(worker.id), worker.held_bytes)
            if shared_bytes != worker.shared_bytes:
                self._tell(events.WorkerSharingChanged(self._clock(), worker=worker.id, shared_bytes=shared_bytes))

    def _paces(self) -> None:
        """Report step times to the scheduler twice a second, so that each mean covers enough steps."""
        now_s = self._clock()
        if now_s - self._paced_s >= PACES_EVERY_S and (paces := self._fleet.reports.take_paces()):
            self._paced_s = now_s
            self._tell(events.WorkersPaced(now_s, paces=paces))

    def _preemptions(self) -> None:
        """Report each preempted request to the scheduler, once."""
        self._preempted &= self._cluster.requests.keys()
        for request in self._fleet.reports.take_preempted():
            self._without_blocks(request)

    def _without_blocks(self, request: RequestId) -> None:
        """Report a preempted request with the memory it needs to resume.

        It is preempted because it grows: what was last told of it may be too little.
        """
        if request not in self._preempted:
            self._preempted.add(request)
            self.preemptions += 1
            needed_bytes = self._fleet.reports.needed_bytes(request)
            self._tell(events.RequestPreempted(self._clock(), request=request, kv_bytes=needed_bytes))

    def _news(self, sizes: dict[RequestId, int]) -> dict[RequestId, int]:
        """Return the sizes that the scheduler should know: a request that is recomputed may shrink for a while.

        A preempted request is reported once it holds again what it held before.
        """
        known = self._cluster.requests
        news = {}
        for name, kv_bytes in sizes.items():
            request = known.get(name)
            if request is None or request.worker is None:
                continue
            if not kv_bytes and self._fleet.reports.needed_bytes(name) > request.kv_bytes:
                self._without_blocks(name)  # it resumes, and grew unheard before its last worker died
            if kv_bytes < request.kv_bytes:
                continue
            if kv_bytes > request.kv_bytes or name in self._preempted:
                self._preempted.discard(name)
                news[name] = kv_bytes
        return news
