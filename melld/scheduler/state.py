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

import msgspec

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


class Request(msgspec.Struct, eq=False):
    """A sequence.  `kv_bytes` never shrinks.  Counts on `worker` and, while it moves, on `destination` too.

    `pinned`: an operator chose its place or destination, and no policy moves it from there.  `waits_since_s`: when it
    arrived, or lost its last worker.  `placed_s`: when it was last given one.  `suspensions`: how often it
    was suspended, the last time at `suspended_s`.  `promises`: how often room was promised to it.  `decodes`: it has
    grown since it was placed, so its prompt is computed.
    """

    id: RequestId
    kv_bytes: int
    priority: int
    sequence: int
    arrived_s: float = 0.0
    client: str = ""
    prompt_tokens: int = 0
    cached_tokens: Mapping[WorkerId, int] = {}
    waits_since_s: float = 0.0
    placed_s: float = float("-inf")
    moved_s: float = 0.0
    suspended_s: float = 0.0
    promises: int = 0
    suspensions: int = 0
    pinned: bool = False
    decodes: bool = False
    state: RequestState = RequestState.WAITING
    worker: "Worker | None" = None
    destination: "Worker | None" = None

    def __post_init__(self) -> None:
        self.waits_since_s = self.arrived_s

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


class Worker(msgspec.Struct, eq=False):
    """A worker: a bin of the packing problem.

    `requests` run here (leaving ones included); `arriving` are the reservations of moves to this worker.
    `count` is the number of both, each with a slot, `urgent` those of the class high among them; `used_bytes` is the
    sum of their sizes less `shared_bytes`, and `leaving_bytes` the sizes of those on moves away from here.
    `shared_bytes`: saved by blocks that several requests hold.  It is the last report, less all that has left since:
    a leaving request frees only what no other may hold, until the worker reports again.
    `promised_bytes`: kept for a request that waits (`promises`).
    `growth_bytes_s`: recent growth of each request per second; 0 until it has been observed.
    `wake_s`: time from its activation, at `active_s`, until it computes, 0 if it does; `ready_s`: the time of the last
    change of `wake_s`.
    `slots`: the most requests that it may have now: none while it is not `steady`, except as a last resort.
    `order` is unique and grows with each activation: among active workers, the greatest was activated last.
    """

    id: WorkerId
    capacity_bytes: int
    slots: int
    machine: int
    rank: int
    largest_capacity_bytes: int = 0
    offered_slots: int = 0
    steady: bool = True
    order: int = -1
    state: Duty = Duty.ASLEEP
    requests: dict[RequestId, Request] = {}
    arriving: dict[RequestId, Request] = {}
    count: int = 0
    urgent: int = 0
    used_bytes: int = 0
    shared_bytes: int = 0
    promised_bytes: int = 0
    leaving: int = 0
    leaving_bytes: int = 0
    empty_since_s: float = 0.0
    growing: int = 0
    grown_bytes: int = 0
    growth_bytes_s: float = 0.0
    wake_s: float = 0.0
    active_s: float = 0.0
    ready_s: float = 0.0

    def __post_init__(self) -> None:
        self.largest_capacity_bytes, self.offered_slots = self.capacity_bytes, self.slots

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

    @property
    def movable(self) -> list[Request]:
        """Return the requests that a policy may move from here."""
        return [request for request in self.requests.values() if request.is_movable]

    def frees_bytes(self, kv_bytes: int) -> int:
        """Return the bytes that are certainly free after requests of that size have left."""
        return max(kv_bytes - self.shared_bytes, 0)

    def after(self, event: str) -> Duty:
        """Return the state that `event` leads to; raise `IllegalTransition` if the table has none."""
        try:
            return WORKER_TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalTransition("worker", self.id, self.state, event) from None
