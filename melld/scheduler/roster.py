"""The workers that are known, and which of them sleep: who is woken next, and what is too large for all.

Owns the names and ranks of workers; never changes a worker's state and never decides when to wake one.
"""

import heapq

from melld.errors import IllegalTransition
from melld.ids import WorkerId
from melld.scheduler.events import WorkerUp
from melld.scheduler.state import Worker, WorkerState

OPEN_STATES = (WorkerState.ASLEEP, WorkerState.ACTIVE)


class Roster:
    """Workers in the order in which they became known (their rank): the first that sleeps is woken first.

    So the same few workers are in use again and again, and the others sleep deeply.  One whose process has ended comes
    after those that answer at once.
    """

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self._asleep: list[tuple[float, int, WorkerId]] = []  # a heap; who was woken since is dropped when met
        self._ranks = 0
        self.largest_capacity_bytes = 0
        """The most that any known worker has ever offered."""
        self.block_bytes = 0
        """The largest block of any worker that there has been."""
        self._largest_open_bytes = -1  # that those offer which take requests

    def add(self, event: WorkerUp) -> Worker:
        """A worker may be used from now on; it sleeps."""
        if event.worker in self.workers:
            raise IllegalTransition("worker", event.worker, self.workers[event.worker].state, "come up")
        self._ranks += 1
        self.block_bytes = max(self.block_bytes, event.block_bytes)
        worker = Worker(event.worker, event.capacity_bytes, event.slots, event.machine, self._ranks)
        self.workers[worker.id] = worker
        self.sleeps(worker)
        self.largest_capacity_bytes = max(self.largest_capacity_bytes, event.capacity_bytes)
        if event.slots > 0:
            self._largest_open_bytes = max(self._largest_open_bytes, event.capacity_bytes)
        return worker

    def remove(self, worker: Worker) -> None:
        """The worker is gone."""
        del self.workers[worker.id]
        self.note()

    def note(self) -> None:
        """A worker offers more or less than before."""
        known = self.workers.values()
        self.largest_capacity_bytes = max((worker.largest_capacity_bytes for worker in known), default=0)
        usable = (worker.capacity_bytes for worker in known if worker.state in OPEN_STATES and worker.offered_slots > 0)
        self._largest_open_bytes = max(usable, default=-1)

    def sleeps(self, worker: Worker) -> None:
        """The worker may be woken again."""
        heapq.heappush(self._asleep, (worker.wake_s, worker.rank, worker.id))

    def wakes_in(self, worker: Worker, wake_s: float, now_s: float) -> None:
        """Waking the worker takes so long from now on."""
        if worker.wake_s != wake_s:
            worker.wake_s = wake_s
            worker.ready_s = now_s
            if worker.state is WorkerState.ASLEEP:
                self.sleeps(worker)

    def sleeping(self, kv_bytes: int) -> Worker | None:
        """Of the sleeping workers that are large enough the one that wakes soonest, of equals the first known."""
        asleep = self._asleep
        while asleep and self._asleep_worker(asleep[0]) is None:
            heapq.heappop(asleep)
        if not asleep:
            return None
        first = self._asleep_worker(asleep[0])
        if first is not None and kv_bytes <= first.capacity_bytes and first.slots > 0:
            return first
        for entry in sorted(asleep):
            worker = self._asleep_worker(entry)
            if worker is not None and kv_bytes <= worker.capacity_bytes and worker.slots > 0:
                return worker
        return None

    def could_hold(self, kv_bytes: int) -> bool:
        """Whether some worker that takes requests, asleep or active, would hold that much if it were empty."""
        return kv_bytes <= self._largest_open_bytes

    def _asleep_worker(self, entry: tuple[float, int, WorkerId]) -> Worker | None:
        wake_s, rank, name = entry
        worker = self.workers.get(name)
        if worker is None or worker.rank != rank or worker.wake_s != wake_s:
            return None
        return worker if worker.state is WorkerState.ASLEEP else None
