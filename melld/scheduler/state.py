"""The scheduler's records of workers and requests, and their lifecycles.

Never decides anything.  Only `cluster.Cluster` changes these records.

    worker    ASLEEP ─activate─► ACTIVE ─drain─► DRAINING ─retire─► WITHDRAWN
                 ▲ └──────────────◄─retire─┘ ◄─resume─┘                  │
                 └────────────────────────────────────────────resume─────┘
    request   WAITING ─place─► RUNNING ─move─► MOVING ─commit, abort─► RUNNING;  lose (its worker, or its
              room there to a suspension): back to WAITING
"""

import enum
from collections.abc import Mapping

from melld.errors import IllegalTransition
from melld.ids import RequestId, WorkerId


class Duty(enum.StrEnum):
    """The use that policies may make of a worker.  A worker that is down is unknown."""

    ASLEEP = "asleep"
    ACTIVE = "active"
    DRAINING = "draining"
    WITHDRAWN = "withdrawn"


class RequestState(enum.StrEnum):
    """State of a request.  A request that has finished is unknown."""

    WAITING = "waiting"
    RUNNING = "running"
    MOVING = "moving"


WAITING = RequestState.WAITING
RUNNING = RequestState.RUNNING

WORKER_TRANSITIONS: Mapping[tuple[Duty, str], Duty] = {
    (Duty.ASLEEP, "activate"): Duty.ACTIVE,
    (Duty.ASLEEP, "drain"): Duty.WITHDRAWN,
    (Duty.ASLEEP, "resume"): Duty.ASLEEP,
    (Duty.ACTIVE, "retire"): Duty.ASLEEP,
    (Duty.ACTIVE, "drain"): Duty.DRAINING,
    (Duty.ACTIVE, "resume"): Duty.ACTIVE,
    (Duty.DRAINING, "drain"): Duty.DRAINING,
    (Duty.DRAINING, "retire"): Duty.WITHDRAWN,
    (Duty.DRAINING, "resume"): Duty.ACTIVE,
    (Duty.WITHDRAWN, "drain"): Duty.WITHDRAWN,
    (Duty.WITHDRAWN, "resume"): Duty.ASLEEP,
}

REQUEST_TRANSITIONS: Mapping[tuple[RequestState, str], RequestState] = {
    (RequestState.WAITING, "place"): RequestState.RUNNING,
    (RequestState.RUNNING, "move"): RequestState.MOVING,
    (RequestState.RUNNING, "lose"): RequestState.WAITING,
    (RequestState.MOVING, "commit"): RequestState.RUNNING,
    (RequestState.MOVING, "abort"): RequestState.RUNNING,
    (RequestState.MOVING, "lose"): RequestState.WAITING,
}


NOTHING_CACHED: Mapping[WorkerId, int] = {}


class Request:
    """A sequence.  `kv_bytes` never shrinks.  Counts on `worker` and, while it moves, on `destination` too.

    `pinned`: an operator chose its place or destination, and no policy moves it from there.  `waits_since_s`: when it
    arrived, or lost its last worker.  `suspensions`: how often it was suspended, the last time at `suspended_s`.
    `promises`: how often room was promised to it.
    """

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "client",
        "destination",
        "id",
        "kv_bytes",
        "moved_s",
        "pinned",
        "placed_s",
        "priority",
        "promises",
        "prompt_tokens",
        "sequence",
        "state",
        "suspended_s",
        "suspensions",
        "waits_since_s",
        "worker",
    )

    worker: "Worker | None"
    destination: "Worker | None"

    def __init__(
        self,
        request: RequestId,
        kv_bytes: int,
        priority: int,
        sequence: int,
        arrived_s: float = 0.0,
        client: str = "",
        prompt_tokens: int = 0,
        cached_tokens: Mapping[WorkerId, int] = NOTHING_CACHED,
    ) -> None:
        self.id = request
        self.kv_bytes = kv_bytes
        self.priority = priority
        self.sequence = sequence
        self.arrived_s = self.waits_since_s = arrived_s
        self.client = client
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.placed_s = self.moved_s = self.suspended_s = 0.0
        self.promises = self.suspensions = 0
        self.pinned = False
        self.state = WAITING
        self.worker = self.destination = None

    @property
    def urgent(self) -> bool:
        """Return True if the request is of the class high."""
        return self.priority < 0

    @property
    def is_movable(self) -> bool:
        """Return True if a policy may move the request: it runs, is not moving, and is not pinned."""
        return self.state is RUNNING and not self.pinned

    def after(self, event: str) -> RequestState:
        """Return the state that `event` leads to; raise `IllegalTransition` if the table has none."""
        try:
            return REQUEST_TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalTransition("request", self.id, self.state, event) from None


class Worker:
    """A worker: a bin of the packing problem.

    `requests` run here (leaving ones included); `arriving` are the reservations of moves to this worker.
    `count` is the number of both, each with a slot, `urgent` those of the class high among them; `used_bytes` is the
    sum of their sizes less `shared_bytes`, and `leaving_bytes` the sizes of those on moves away from here.
    `shared_bytes`: saved by blocks that several requests hold.  It is the last report, less all that has left since:
    a leaving request frees only what no other may hold, until the worker reports again.
    `promised_bytes`: kept for a request that waits (`promises`).
    `growth_bytes_s`: recent growth of each request per second; 0 until it has been observed.
    `wake_s`: time until it computes, 0 if it does; `ready_s`: the time of the last change of `wake_s`.
    `slots`: the most requests that it may have now: none while it is not `steady`, except as a last resort.
    `order` is unique and grows with each activation: among active workers, the greatest was activated last.
    """

    __slots__ = (
        "arriving",
        "capacity_bytes",
        "count",
        "empty_since_s",
        "growing",
        "grown_bytes",
        "growth_bytes_s",
        "id",
        "key",
        "largest_capacity_bytes",
        "leaving",
        "leaving_bytes",
        "machine",
        "offered_slots",
        "order",
        "promised_bytes",
        "rank",
        "ready_s",
        "requests",
        "shared_bytes",
        "slots",
        "state",
        "steady",
        "urgent",
        "used_bytes",
        "wake_s",
    )

    def __init__(self, worker: WorkerId, capacity_bytes: int, slots: int, machine: int, rank: int) -> None:
        self.id = worker
        self.capacity_bytes = capacity_bytes
        self.largest_capacity_bytes = capacity_bytes
        self.slots = self.offered_slots = slots
        self.steady = True
        self.machine = machine
        self.rank = rank
        self.order = -1
        self.state = Duty.ASLEEP
        self.requests: dict[RequestId, Request] = {}
        self.arriving: dict[RequestId, Request] = {}
        self.count = self.urgent = 0
        self.used_bytes = 0
        self.shared_bytes = 0
        self.promised_bytes = 0
        self.leaving = 0
        self.leaving_bytes = 0
        self.empty_since_s = 0.0
        self.growing = 0
        self.grown_bytes = 0
        self.growth_bytes_s = 0.0
        self.key: int | None = None
        self.wake_s = 0.0
        self.ready_s = 0.0

    @property
    def free_bytes(self) -> int:
        """Return the bytes free now; negative if growth or lost capacity has overfilled the worker."""
        return self.capacity_bytes - self.used_bytes

    @property
    def settled_free_bytes(self) -> int:
        """Return the bytes that will be free once every move in flight has committed."""
        return self.capacity_bytes - self.used_bytes + self.leaving_bytes

    @property
    def held_bytes(self) -> int:
        """Return the sum of the full sizes of all running and arriving requests."""
        return self.used_bytes + self.shared_bytes

    def frees_bytes(self, kv_bytes: int) -> int:
        """Return the bytes that are certainly free after requests of that size have left."""
        return max(kv_bytes - self.shared_bytes, 0)

    def after(self, event: str) -> Duty:
        """Return the state that `event` leads to; raise `IllegalTransition` if the table has none."""
        try:
            return WORKER_TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalTransition("worker", self.id, self.state, event) from None
