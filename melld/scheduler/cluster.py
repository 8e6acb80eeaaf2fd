"""The state of one model's workers and requests, and the only code that changes it.

Owns the lifecycles and the order of the commands (`Occupancy` owns the sums); never decides where requests go (policies
do) and never acts.  Queries (`fits`, `room_bytes`, `sleeping`) change nothing.

    policy ──asks──► Cluster ◄──facts── Scheduler
       └─decides──► activate / assign / retire ──► commands, in the order in which they must be applied

Two kinds of moves.  In flight: a moving request counts on both workers until `commit` or `abort`.  Instant
(`ClusterSettings.instant_moves`, the paper's assumption): the source is free at once, so commands applied in order
never exceed a capacity; the acknowledgement that follows changes nothing.

`fits` looks one horizon ahead: each request on a worker adds `ahead_bytes`, the recently observed growth times
`horizon_s`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from melld.errors import IllegalTransition
from melld.ids import NO_EVENT, RequestId, WorkerId
from melld.scheduler.events import (
    ActivateWorker,
    AnyCommand,
    MoveRequest,
    PlaceRequest,
    RequestArrived,
    RetireWorker,
    SuspendRequest,
    WorkerUp,
)
from melld.scheduler.growth import GrowthRate
from melld.scheduler.occupancy import Occupancy
from melld.scheduler.priorities import Priorities
from melld.scheduler.reasons import Reason
from melld.scheduler.roles import RoleSettings
from melld.scheduler.roster import Distances, Roster
from melld.scheduler.state import Duty, Request, Worker
from melld.scheduler.targets import Targets


class ClusterSettings(msgspec.Struct, frozen=True):
    """`horizon_s`: how far ahead growth is estimated.  `instant_moves`: a move is done as soon as it is decided.

    `targets`: what the service promises; None: nothing but room.  `retire_after_s`: how long a worker stays awake
    without requests (checked at epochs); None: as long as the policy thinks best.  `kv_between_machines`: else a move
    to another machine goes by tokens.
    """

    horizon_s: float = 0.0
    instant_moves: bool = False
    targets: Targets | None = None
    retire_after_s: float | None = None
    priorities: Priorities = Priorities()
    roles: RoleSettings = RoleSettings()
    kv_between_machines: bool = False


class Cluster(Occupancy):
    """All workers and requests of one model."""

    def __init__(self, settings: ClusterSettings | None = None) -> None:
        self.settings = settings or ClusterSettings()
        super().__init__(self.settings.priorities)
        self.growth = GrowthRate()
        self.roster = Roster()
        self.workers = self.roster.workers
        self.sleeping, self.could_hold = self.roster.sleeping, self.roster.could_hold
        self.distances = Distances(self.roster, self.room_bytes, self.settings.kv_between_machines)
        self.draining: dict[WorkerId, Worker] = {}
        self.unsteady: dict[WorkerId, Worker] = {}
        self.event = NO_EVENT
        """The event being handled: the cause of all commands."""
        self.commands: list[AnyCommand] = []  # decided, not yet taken
        self._orders = 0
        self._sequences = 0

    # ---- deciding: each records its command

    def activate(self, worker: Worker, reason: Reason) -> None:
        """Wake the worker: requests may be assigned to it from now on."""
        worker.state = worker.after("activate")
        self.roster.sleeps_no_more(worker)
        self._orders += 1
        worker.order = self._orders
        worker.active_s = worker.empty_since_s = self.now_s
        self.active[worker.id] = worker
        self._empty[worker.id] = worker
        self.room.note(worker)
        self.commands.append(ActivateWorker(reason, worker.id, cause=self.event))

    def retire(self, worker: Worker, reason: Reason) -> None:
        """Put the empty worker to sleep."""
        assert not worker.count, worker.id
        worker.state = worker.after("retire")
        self.draining.pop(worker.id, None)
        self.active.pop(worker.id, None)
        self._empty.pop(worker.id, None)
        self.room.note(worker)
        if worker.state is Duty.ASLEEP:
            self.roster.sleeps(worker)
        self.commands.append(RetireWorker(reason, worker.id, cause=self.event))

    def assign(
        self,
        request: Request,
        worker: Worker,
        reason: Reason,
        urgency_s: float = float("inf"),
        after_first_token: bool = False,
    ) -> None:
        """Place the waiting request on the worker, or move the running one there.  It must fit."""
        assert self.fits(worker, request.kv_bytes), (request.id, worker.id)
        source = request.worker
        if source is None:
            request.state = request.after("place")
            self.waiting.begin(request)
            request.placed_s = self.now_s
            request.worker = worker
            self._take(request, worker, worker.requests)
            self.commands.append(PlaceRequest(reason, request.id, worker.id, request.kv_bytes, cause=self.event))
            return
        assert source is not worker, request.id
        assert not request.pinned or reason is Reason.OPERATOR, request.id
        request.state = request.after("move")
        request.moved_s = self.now_s
        self._begin_move(request, source, worker)
        ends = request.id, source.id, worker.id
        how = urgency_s, after_first_token
        self.commands.append(MoveRequest(reason, *ends, request.kv_bytes, *how, cause=self.event))
        if self.settings.instant_moves:
            self.commit(request)

    def suspend(self, request: Request, reason: Reason) -> None:
        """Take the running request off its worker: it waits as if the worker had died."""
        assert request.is_movable, request.id
        worker = request.worker
        assert worker is not None, request.id
        self._displace(request, worker)
        request.suspensions += 1
        request.suspended_s = self.now_s
        self.commands.append(SuspendRequest(reason, request.id, worker.id, cause=self.event))

    def pin(self, request: Request) -> None:
        """Pin the running request for an operator: policies leave it where it is, or where it is sent next."""
        request.pinned = True

    def unpin(self, request: Request) -> None:
        """Let policies move the request again."""
        request.pinned = False

    def record(self, command: AnyCommand) -> None:
        """Add a command that changes no sums (queue, refuse) to the others."""
        self.commands.append(command)

    def take_commands(self) -> list[AnyCommand]:
        """Return the commands decided since the last call."""
        commands, self.commands = self.commands, []
        return commands

    # ---- facts about workers

    def add_worker(self, event: WorkerUp) -> Worker:
        """Add a worker that may be used from now on; raise `IllegalTransition` if it is known."""
        worker = self.roster.add(event)
        if not event.steady:
            worker.steady = False
            worker.slots = 0
            self.unsteady[worker.id] = worker
        return worker

    def remove_worker(self, worker: Worker) -> list[Request]:
        """Remove a dead worker and abort moves to it; return its requests, which now wait ahead of others."""
        for request in list(worker.arriving.values()):
            self.abort(request)
        displaced = list(worker.requests.values())
        for request in displaced:
            self._displace(request, worker)
        self.roster.remove(worker)
        self.unsteady.pop(worker.id, None)
        self.draining.pop(worker.id, None)
        self.active.pop(worker.id, None)
        self._empty.pop(worker.id, None)
        self.room.note_all()  # a note is by name, which a successor may have before the next look
        return displaced

    def _displace(self, request: Request, worker: Worker) -> None:
        """Queue the request, without a worker, ahead of newcomers."""
        state = request.after("lose")
        self._leave(request, worker)
        request.state = state
        self.unpin(request)
        request.waits_since_s = self.now_s
        self.waiting.add(request, displaced=True)

    def resize_worker(self, worker: Worker, capacity_bytes: int, slots: int) -> None:
        """Change the worker's capacity and slots, possibly below its current use."""
        worker.capacity_bytes = capacity_bytes
        worker.largest_capacity_bytes = max(worker.largest_capacity_bytes, capacity_bytes)
        worker.offered_slots = slots
        worker.slots = slots if worker.steady else 0
        self.roster.note()
        self.room.note(worker)

    def steady_worker(self, worker: Worker) -> None:
        """Treat the worker like any other again: it is no longer unsteady."""
        del self.unsteady[worker.id]
        worker.steady = True
        worker.slots = worker.offered_slots
        self.room.note(worker)

    @contextmanager
    def last_resort(self) -> Iterator[None]:
        """Allow assignments to unsteady workers inside the context."""
        for worker in self.unsteady.values():
            worker.slots = worker.offered_slots
            self.room.note(worker)
        try:
            yield
        finally:
            for worker in self.unsteady.values():
                worker.slots = 0
                self.room.note(worker)

    def drain_worker(self, worker: Worker) -> None:
        """Drain the worker: assign nothing more to it.  Idempotent."""
        was, worker.state = worker.state, worker.after("drain")
        if was is Duty.ASLEEP:
            self.roster.sleeps_no_more(worker)
        self.roster.note()
        self.active.pop(worker.id, None)
        if worker.state is Duty.DRAINING:
            self.draining[worker.id] = worker
        self.room.note(worker)

    def resume_worker(self, worker: Worker) -> None:
        """Let the worker take requests again; it keeps its place in the order of activation."""
        was, worker.state = worker.state, worker.after("resume")
        if was is worker.state:
            return
        self.roster.note()
        self.draining.pop(worker.id, None)
        if worker.state is Duty.ACTIVE:
            self.active[worker.id] = worker
            self.room.note(worker)
        else:
            self.roster.sleeps(worker)

    # ---- facts about requests

    def add_request(self, event: RequestArrived) -> Request:
        """Add a request, to be assigned or queued; raise `IllegalTransition` if it is known."""
        name, sequence = event.request, self._sequences + 1
        facts = event.client, event.prompt_tokens, event.cached_tokens
        request = Request(name, event.kv_bytes, event.priority, sequence, event.at_s, *facts)
        if (known := self.requests.setdefault(name, request)) is not request:
            raise IllegalTransition("request", name, known.state, "arrive")
        self._sequences = sequence
        return request

    def grow(self, sizes: dict[RequestId, int]) -> None:
        """Apply the new sizes (`Occupancy.grow`), and update the growth to expect."""
        super().grow(sizes)
        self.growth.observe(self.now_s, self.workers.values())
        ahead_bytes = self.growth.ahead_bytes(self.settings.horizon_s)
        if ahead_bytes != self.ahead_bytes:
            self.ahead_bytes = ahead_bytes
            self.room.note_all()

    def remove_request(self, request: Request) -> Worker | None:
        """Remove an ended request; return the worker that ran it, or None if it waited."""
        worker = request.worker
        if worker is None:
            if request.id in self.waiting:
                self.waiting.remove(request.id)
        else:
            self._leave(request, worker)
        del self.requests[request.id]
        return worker

    def commit(self, request: Request) -> None:
        """Complete the move: the request now runs only on its destination."""
        request.state = request.after("commit")
        self._arrive(request, *_ends(request))

    def abort(self, request: Request) -> None:
        """Cancel the move: the request runs only on its source."""
        request.state = request.after("abort")
        self.unpin(request)
        self._end_move(request, *_ends(request))


def _ends(request: Request) -> tuple[Worker, Worker]:
    """Return the source and the destination of the request's move."""
    assert request.worker is not None, request.id
    assert request.destination is not None, request.id
    return request.worker, request.destination
