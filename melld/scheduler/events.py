"""What the scheduler is told, and what it answers.

Events are facts, in the past tense.  Commands are decisions, in the imperative.  Both are frozen.
`scheduler.Scheduler.handle` takes one event and returns the commands in the order in which they must be applied.

    event ──► Scheduler.handle ──► commands ──► driver (daemon) or simulator ──► events ...

Times are seconds on a monotonic clock that the caller chooses.  Sizes are bytes of KV blocks.
"""

import msgspec

from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.scheduler.reasons import Reason


class Caused(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What says which event brought it about."""

    cause: EventId = NO_EVENT


class Identified(Caused, frozen=True, gc=False, kw_only=True):
    """What others may name as their cause."""

    id: EventId = NO_EVENT


class Event(Identified, frozen=True, tag=True, gc=False):
    """A fact.  `at_s` never decreases from one event to the next.

    `id` numbers the events from 1, in the order in which the scheduler is told.  `cause` is the event on which was
    decided what has now happened; `NO_EVENT` where nobody decided it.
    """

    at_s: float


class RequestArrived(Event, frozen=True, tag=True, gc=False):
    """A request wants a worker.  `kv_bytes` is what its prompt needs.  Lower `priority` goes first, as in vLLM.

    `client` is who shares what there is with other clients: a short name for an API key, never the key.
    """

    request: RequestId
    kv_bytes: int
    prompt_tokens: int = 0
    priority: int = 0
    client: str = ""


class RequestsGrew(Event, frozen=True, tag=True):
    """The present size of every request that has grown since the last such event (placed requests only)."""

    kv_bytes: dict[RequestId, int]


class RequestFinished(Event, frozen=True, tag=True, gc=False):
    """The request has ended, in whatever way; its blocks are free on all workers that held them."""

    request: RequestId


class RequestPreempted(Event, frozen=True, tag=True, gc=False):
    """vLLM itself pushed the request out of its worker's running set for lack of blocks.  It stays on that worker."""

    request: RequestId


class WorkerUp(Event, frozen=True, tag=True, gc=False):
    """A worker may be used: `activate` may name it.  `slots` is the most requests that it runs at once.

    `machine` groups workers that are near each other (the distance part of the priority of GPUs).  `block_bytes`: sizes
    grow in steps of so many; 0: in any.
    """

    worker: WorkerId
    capacity_bytes: int
    slots: int = 2**31
    machine: int = 0
    block_bytes: int = 0
    steady: bool = True
    """False: it has died of late.  Until `WorkerSteadied` it is given what no other worker has room for."""


class WorkerSteadied(Event, frozen=True, tag=True, gc=False):
    """The worker has worked for long enough since it died: it is as good as any other."""

    worker: WorkerId


class WorkerDown(Event, frozen=True, tag=True, gc=False):
    """A worker has died or was taken away.  Its requests are placed anew or queued, ahead of those that wait."""

    worker: WorkerId


class WorkerCapacityChanged(Event, frozen=True, tag=True, gc=False):
    """Someone else has taken, or given back, memory of the worker's device."""

    worker: WorkerId
    capacity_bytes: int


class WorkerSharingChanged(Event, frozen=True, tag=True, gc=False):
    """So much less than the sum of its requests' sizes is used on the worker: blocks that several hold are there once.

    Counts requests that run there or are on their way there, and those alone.
    """

    worker: WorkerId
    shared_bytes: int


class WorkerSlotsChanged(Event, frozen=True, tag=True, gc=False):
    """The worker should run at most so many requests at once, perhaps fewer than it has: its steps became too slow."""

    worker: WorkerId
    slots: int


class WorkerDraining(Event, frozen=True, tag=True, gc=False):
    """No new requests for this worker; those that it has are moved away as room is found."""

    worker: WorkerId


class WorkerResumed(Event, frozen=True, tag=True, gc=False):
    """The worker takes requests again."""

    worker: WorkerId


class WorkerWakeTimeChanged(Event, frozen=True, tag=True, gc=False):
    """How long requests wait for the worker once it is activated: 0 while its process is warm.

    Of the sleeping workers that are large enough, the one that wakes soonest is activated first.
    """

    worker: WorkerId
    wake_s: float


class MoveCommitted(Event, frozen=True, tag=True, gc=False):
    """The request now runs on the move's destination alone.

    The source has been told to free its blocks, and reads that before anything that is placed there from now on.
    `destination` tells a late answer from the answer to a newer move; None means the move in flight.  `via` is the way
    that it went in the end, for the decision log: empty if nobody says.
    """

    request: RequestId
    destination: WorkerId | None = None
    via: str = ""


class MoveAborted(Event, frozen=True, tag=True, gc=False):
    """The request still runs on the move's source alone; the destination's reservation is free."""

    request: RequestId
    reason: str = ""
    destination: WorkerId | None = None


class MoveAsked(Event, frozen=True, tag=True, gc=False):
    """An operator wants the request there.  A `MoveRequest` answers, unless it has no room there or does not run."""

    request: RequestId
    destination: WorkerId


class EpochStarted(Event, frozen=True, tag=True, gc=False):
    """The period of re-planning begins: overloads are judged, batched operations are carried out."""


class Command(Caused, frozen=True, tag=True, gc=False):
    """A decision, what it is for, and the event that it was made on."""

    reason: Reason


class PlaceRequest(Command, frozen=True, tag=True, gc=False):
    """Give the request to the worker (which may still be waking: the request waits for it)."""

    request: RequestId
    worker: WorkerId


class QueueRequest(Command, frozen=True, tag=True, gc=False):
    """No worker has room: the request waits; a later `PlaceRequest` ends its wait."""

    request: RequestId


class RefuseRequest(Command, frozen=True, tag=True, gc=False):
    """The request can never fit: `melld.errors.RequestTooLarge` is its answer."""

    request: RequestId
    kv_bytes: int
    capacity_bytes: int


class ShedRequest(Command, frozen=True, tag=True, gc=False):
    """Send the request, which has not begun, away: `Reason.QUEUE_FULL` or `Reason.WAITED_TOO_LONG`."""

    request: RequestId


class MoveRequest(Command, frozen=True, tag=True, gc=False):
    """Start to move the request.  It counts on both workers until `MoveCommitted` or `MoveAborted`.

    `urgency_s`: seconds until the source overflows if the request stays; infinity when nothing presses.
    """

    request: RequestId
    source: WorkerId
    destination: WorkerId
    kv_bytes: int
    urgency_s: float = float("inf")


class ActivateWorker(Command, frozen=True, tag=True, gc=False):
    """The worker is about to be given requests: wake it."""

    worker: WorkerId


class RetireWorker(Command, frozen=True, tag=True, gc=False):
    """The worker has no requests and none are coming: it may sleep."""

    worker: WorkerId


AnyEvent = (
    RequestArrived
    | RequestsGrew
    | RequestFinished
    | RequestPreempted
    | WorkerUp
    | WorkerSteadied
    | WorkerDown
    | WorkerCapacityChanged
    | WorkerSharingChanged
    | WorkerSlotsChanged
    | WorkerWakeTimeChanged
    | WorkerDraining
    | WorkerResumed
    | MoveCommitted
    | MoveAborted
    | MoveAsked
    | EpochStarted
)
AnyCommand = PlaceRequest | QueueRequest | RefuseRequest | ShedRequest | MoveRequest | ActivateWorker | RetireWorker
