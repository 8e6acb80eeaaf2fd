"""Roster of the known workers: which sleep, which is woken next, what fits none, and which are near.

Owns the names and ranks of workers; never changes a worker's state and never decides when to wake one.
"""

from bisect import bisect_left, insort
from collections.abc import Callable

from melld.errors import IllegalTransition
from melld.ids import WorkerId
from melld.scheduler.events import WorkerUp
from melld.scheduler.state import Duty, Worker

OPEN_STATES = (Duty.ASLEEP, Duty.ACTIVE)


class Roster:
    """Workers by machine and rank, the order in which they became known: the first that sleeps is woken first.

    So the same few workers are used again and again, on as few machines as will do, and the others sleep long.  A
    worker whose process has ended comes after the warm ones.
    """

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.machines: dict[int, dict[WorkerId, Worker]] = {}
        """The workers of each machine; none is empty."""
        self._asleep: list[Worker] = []  # in the order of waking
        self._ranks = 0
        self.largest_capacity_bytes = 0
        """Largest capacity that any known worker has ever offered."""
        self.block_bytes = 0
        """Largest block of any worker so far."""
        self._largest_open_bytes = -1  # largest capacity among workers that take requests

    def add(self, event: WorkerUp) -> Worker:
        """Add a worker, asleep."""
        if event.worker in self.workers:
            raise IllegalTransition("worker", event.worker, self.workers[event.worker].state, "come up")
        self._ranks += 1
        self.block_bytes = max(self.block_bytes, event.block_bytes)
        worker = Worker(event.worker, event.capacity_bytes, event.slots, event.machine, self._ranks)
        self.workers[worker.id] = worker
        self.machines.setdefault(worker.machine, {})[worker.id] = worker
        self.sleeps(worker)
        self.largest_capacity_bytes = max(self.largest_capacity_bytes, event.capacity_bytes)
        if event.slots > 0:
            self._largest_open_bytes = max(self._largest_open_bytes, event.capacity_bytes)
        return worker

    def remove(self, worker: Worker) -> None:
        """Remove a lost worker."""
        if worker.state is Duty.ASLEEP:
            self.sleeps_no_more(worker)
        del self.workers[worker.id]
        del self.machines[worker.machine][worker.id]
        if not self.machines[worker.machine]:
            del self.machines[worker.machine]
        self.note()

    def note(self) -> None:
        """Recompute the largest capacities after a worker's offer has changed."""
        known = self.workers.values()
        self.largest_capacity_bytes = max((worker.largest_capacity_bytes for worker in known), default=0)
        usable = (worker.capacity_bytes for worker in known if worker.state in OPEN_STATES and worker.offered_slots > 0)
        self._largest_open_bytes = max(usable, default=-1)

    def sleeps(self, worker: Worker) -> None:
        """Add the worker to those that can be woken."""
        insort(self._asleep, worker, key=_turn)

    def sleeps_no_more(self, worker: Worker) -> None:
        """Remove the worker from those that can be woken."""
        del self._asleep[bisect_left(self._asleep, _turn(worker), key=_turn)]

    def wakes_in(self, worker: Worker, wake_s: float, now_s: float) -> None:
        """Set the time that waking the worker takes from now on."""
        if worker.wake_s == wake_s:
            return
        is_asleep = worker.state is Duty.ASLEEP
        if is_asleep:
            self.sleeps_no_more(worker)
        worker.wake_s = wake_s
        worker.ready_s = now_s
        if is_asleep:
            self.sleeps(worker)

    def sleeping(self, kv_bytes: int) -> Worker | None:
        """Return the first sleeping worker that is large enough and wakes soonest, or None."""
        fitting = (one for one in self._asleep if kv_bytes <= one.capacity_bytes and one.slots > 0)
        return next(fitting, None)

    def could_hold(self, kv_bytes: int) -> bool:
        """Return True if some worker that takes requests, asleep or active, could hold that much when empty."""
        return kv_bytes <= self._largest_open_bytes


def _turn(worker: Worker) -> tuple[float, int, int]:
    """Return the sort key of sleeping workers: the least is woken first."""
    return worker.wake_s, worker.machine, worker.rank


class Distances:
    """Distances between the workers of one roster: KV can be copied between those of one machine.

    To a far worker a request moves by its tokens, which are computed anew there.  With `kv_everywhere` none is far.
    """

    def __init__(self, roster: Roster, room_bytes: Callable[[Worker], int], kv_everywhere: bool) -> None:
        self._roster = roster
        self._room_bytes = room_bytes
        self._kv_everywhere = kv_everywhere

    @property
    def some_are_far(self) -> bool:
        """Return True if there are workers far from each other."""
        return len(self._roster.machines) > 1 and not self._kv_everywhere

    def is_far(self, one: Worker, other: Worker) -> bool:
        """Return True if KV cannot be copied between the two."""
        return one.machine != other.machine and not self._kv_everywhere

    def neighbours(self, worker: Worker) -> list[Worker]:
        """Return the other active workers of its machine, the tightest first; none where no worker is far."""
        if not self.some_are_far:
            return []
        known = self._roster.machines.get(worker.machine, {}).values()
        near = [one for one in known if one.state is Duty.ACTIVE and one is not worker]
        return sorted(near, key=lambda one: (self._room_bytes(one), one.order))
