"""Occupancy of workers, and what still fits on them: bytes and slots, now and one horizon ahead.

Owns the sums of every worker (free + used = capacity), the order of the active ones by room, and which are empty.
Changes them as requests come to a worker, leave it and grow.  `Cluster` builds on it and owns states and commands.

A moving request counts on both workers until the move has ended.  What fits depends on the bytes used, where shared
blocks count once; what to move depends on each request's own size.
"""

from melld.ids import RequestId, WorkerId
from melld.scheduler.index import RoomIndex
from melld.scheduler.priorities import Priorities
from melld.scheduler.state import Duty, Request, Worker
from melld.scheduler.waiting import WaitingQueue

ACTIVE = Duty.ACTIVE


class Occupancy:
    """Sums of one model's workers."""

    def __init__(self, priorities: Priorities) -> None:
        self.now_s = 0.0
        self.active: dict[WorkerId, Worker] = {}  # in the order of activation (resumed ones at the end)
        self.requests: dict[RequestId, Request] = {}
        self.waiting = WaitingQueue(priorities)
        self.ahead_bytes = 0
        self.room = RoomIndex(self.active, self.room_bytes)
        self._noted = self.room.noted
        self._empty: dict[WorkerId, Worker] = {}  # awake, without requests

    # ---- asking

    def room_bytes(self, worker: Worker) -> int:
        """Return the largest request that fits one horizon ahead, ignoring slots.  An empty worker needs no horizon."""
        count = worker.count
        ahead_bytes = (count + 1) * self.ahead_bytes if count else 0
        return worker.capacity_bytes - worker.used_bytes - worker.promised_bytes - ahead_bytes

    def fits(self, worker: Worker, kv_bytes: int) -> bool:
        """Return True if a request of that size can be assigned to the worker now."""
        if worker.state is not ACTIVE or worker.count >= worker.slots:
            return False
        return kv_bytes <= self.room_bytes(worker)

    def empty_workers(self) -> list[Worker]:
        """Return the awake workers, active or draining, without requests."""
        return list(self._empty.values())

    # ---- how a request comes to a worker, grows on it, moves and leaves it

    def grow(self, sizes: dict[RequestId, int]) -> None:
        """Apply the new sizes; ignore those of unknown or waiting requests and smaller ones: such reports are late."""
        known, noted = self.requests.get, self._noted
        most_grow = len(sizes) > len(self.active)
        if most_grow:
            self.room.note_all()
        for name, kv_bytes in sizes.items():
            request = known(name)
            if request is None or (worker := request.worker) is None:
                continue
            delta_bytes = kv_bytes - request.kv_bytes
            if delta_bytes <= 0:
                continue
            request.kv_bytes = kv_bytes
            worker.used_bytes += delta_bytes
            if request.decodes:
                worker.growing += 1
                worker.grown_bytes += delta_bytes
            request.decodes = True
            if not most_grow:
                noted[worker.id] = worker
            if request.client:
                self.waiting.share.grow(request.client, delta_bytes)
            if (destination := request.destination) is not None:
                worker.leaving_bytes += delta_bytes
                destination.used_bytes += delta_bytes
                noted[destination.id] = destination

    def share(self, worker: Worker, shared_bytes: int) -> bool:
        """Set the bytes that the worker's requests share; return False if nothing changes."""
        shared_bytes = min(shared_bytes, worker.held_bytes)
        if shared_bytes == worker.shared_bytes:
            return False
        worker.used_bytes = worker.held_bytes - shared_bytes
        worker.shared_bytes = shared_bytes
        self._noted[worker.id] = worker
        return True

    def promise(self, worker: Worker, kv_bytes: int) -> None:
        """Reserve memory on the worker for a waiting request; 0: release it."""
        worker.promised_bytes = kv_bytes
        self._noted[worker.id] = worker

    def _leave(self, request: Request, worker: Worker) -> None:
        if request.destination is not None:
            self._end_move(request, worker, request.destination)
        request.worker = None
        request.decodes = False
        self._give_up(request, worker, worker.requests)

    def _begin_move(self, request: Request, source: Worker, destination: Worker) -> None:
        request.destination = destination
        self._take(request, destination, destination.arriving)
        source.leaving += 1
        source.leaving_bytes += request.kv_bytes

    def _end_move(self, request: Request, source: Worker, destination: Worker) -> None:
        """End the move with the request only on its source."""
        request.destination = None
        source.leaving -= 1
        source.leaving_bytes -= request.kv_bytes
        self._give_up(request, destination, destination.arriving)

    def _arrive(self, request: Request, source: Worker, destination: Worker) -> None:
        """End the move with the request only on its destination."""
        request.destination = None
        source.leaving -= 1
        source.leaving_bytes -= request.kv_bytes
        self._give_up(request, source, source.requests)
        del destination.arriving[request.id]
        request.worker = destination
        destination.requests[request.id] = request

    def _take(self, request: Request, worker: Worker, among: dict[RequestId, Request]) -> None:
        """Add the request to the worker's sums and to `among`, its running or arriving requests."""
        among[request.id] = request
        if not worker.count:
            self._empty.pop(worker.id, None)
        worker.count += 1
        worker.urgent += request.priority < 0
        worker.used_bytes += request.kv_bytes
        self._noted[worker.id] = worker

    def _give_up(self, request: Request, worker: Worker, among: dict[RequestId, Request]) -> None:
        """Remove the request from the worker's sums and from `among`."""
        del among[request.id]
        worker.count -= 1
        worker.urgent -= request.priority < 0
        freed_bytes = worker.frees_bytes(request.kv_bytes)
        worker.shared_bytes -= request.kv_bytes - freed_bytes
        worker.used_bytes -= freed_bytes
        self._noted[worker.id] = worker
        if not worker.count:
            worker.empty_since_s = self.now_s
            self._empty[worker.id] = worker
