"""The scheduler's input (events) and output (commands).

Events are facts, in the past tense.  Commands are decisions, in the imperative.  Both are frozen.  Times are seconds on
a monotonic clock that the caller chooses.  Sizes are bytes of KV blocks.
`scheduler.Scheduler.handle` takes one event and returns the commands in the order in which they must be applied.

    event ──► Scheduler.handle ──► commands ──► driver (daemon) or simulator ──► events ...
"""

from collections.abc import Mapping

import msgspec

from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.scheduler.reasons import Reason
from melld.scheduler.roles import Role


class Caused(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Base of messages that name the event that caused them."""

    cause: EventId = NO_EVENT


class Identified(Caused, frozen=True, gc=False, kw_only=True):
    """Base of messages that others can name as their cause."""

    id: EventId = NO_EVENT


class Event(Identified, frozen=True, tag=True, gc=False):
    """A fact.  `at_s` never decreases from one event to the next.

    `id` numbers the events from 1, in the order in which the scheduler handles them.  `cause` is the event on which
    this outcome was decided; `NO_EVENT` if nothing was decided.
    """

    at_s: float


class RequestArrived(Event, frozen=True, tag=True, gc=False):
    """A request needs a worker.  `kv_bytes`: size of its prompt.  Lower `priority` goes first, as in vLLM."""

    request: RequestId
    kv_bytes: int
    prompt_tokens: int = 0
    priority: int = 0
    client: str = ""  # the unit of fair sharing: a short name for an API key, never the key
    cached_tokens: Mapping[WorkerId, int] = {}
    """How many tokens of its prompt each worker probably has in its prefix cache; none where it is missing."""


class RequestsGrew(Event, frozen=True, tag=True):
    """The current sizes of placed requests that have grown since the last such event."""

    kv_bytes: dict[RequestId, int]


class RequestFinished(Event, frozen=True, tag=True, gc=False):
    """The request has ended, for whatever reason; its blocks are free on all workers.

    `output_tokens`: those its client got.  `first_token_s`: when the first one came; zero: not known, or none came.
    """

    request: RequestId
    output_tokens: int = 0
    first_token_s: float = 0.0


class RequestPreempted(Event, frozen=True, tag=True, gc=False):
    """The request was preempted: it stays on its worker without blocks, and needs this much to resume; 0: unchanged."""

    request: RequestId
    kv_bytes: int = 0


class RequestResumed(Event, frozen=True, tag=True, gc=False):
    """The request's client sees tokens again, `pause_s` after the last one: it was moved, or had lost its worker."""

    request: RequestId
    pause_s: float


class WorkerUp(Event, frozen=True, tag=True, gc=False):
    """A worker may be used and activated.  `slots`: the most requests that it runs at once.

    `machine` groups workers that are near each other.  `block_bytes`: step in which sizes grow; 0: any.
    """

    worker: WorkerId
    capacity_bytes: int
    slots: int = 2**31
    machine: int = 0
    block_bytes: int = 0
    steady: bool = True
    """False: it died recently.  Until `WorkerSteadied` it gets only requests that no other worker has room for."""


class WorkerSteadied(Event, frozen=True, tag=True, gc=False):
    """The worker has worked long enough since its death to be treated like any other."""

    worker: WorkerId


class WorkerDown(Event, frozen=True, tag=True, gc=False):
    """A worker has died or was removed.  Its requests are placed again, or queued ahead of others."""

    worker: WorkerId
    others: tuple[WorkerId, ...] = ()
    """Lost at the same moment, with their machine: so nothing is placed on one that is about to be told lost."""

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Return all lost workers."""
        return self.worker, *self.others


class WorkerCapacityChanged(Event, frozen=True, tag=True, gc=False):
    """Another program has taken or freed memory of the worker's device."""

    worker: WorkerId
    capacity_bytes: int


class WorkerSharingChanged(Event, frozen=True, tag=True, gc=False):
    """The worker uses this much less than the sum of its requests' sizes, because they share blocks."""

    worker: WorkerId
    shared_bytes: int


class WorkerSlotsChanged(Event, frozen=True, tag=True, gc=False):
    """The worker's limit of concurrent requests has changed with its step times; it may be below what it runs."""

    worker: WorkerId
    slots: int


class WorkerDraining(Event, frozen=True, tag=True, gc=False):
    """The worker drains: no new requests, and current ones move away as room is found."""

    worker: WorkerId
    lent_to: str = ""  # the program that gets its device, in words


class WorkerResumed(Event, frozen=True, tag=True, gc=False):
    """The worker takes requests again."""

    worker: WorkerId


class WorkerWakeTimeChanged(Event, frozen=True, tag=True, gc=False):
    """The worker's time from activation to computing has changed; 0 while its process is warm."""

    worker: WorkerId
    wake_s: float


class WorkerPace(msgspec.Struct, frozen=True, gc=False):
    """Durations of a worker's steps since the last such report.

    `step_s`: a step without prompt tokens, of `decodes` requests that read `kv_bytes` in all (means); zero: there was
    none.  `prefill_s`: what `prompts` prompts of `prompt_tokens` in all, ended since then, took beyond that.
    """

    step_s: float = 0.0
    decodes: float = 0.0
    kv_bytes: float = 0.0
    prompts: int = 0
    prompt_tokens: int = 0
    prefill_s: float = 0.0


class WorkersPaced(Event, frozen=True, tag=True):
    """Step times of the workers, sent before an epoch starts."""

    paces: dict[WorkerId, WorkerPace]


class MoveCommitted(Event, frozen=True, tag=True, gc=False):
    """The request now runs only on the move's destination.

    The source reads the order to free its blocks before any request that is placed there from now on.  `destination`
    tells a late answer from the answer to a newer move; None means the move in flight.  `via` is the way that it took
    in the end, for the decision log; empty if unknown.
    """

    request: RequestId
    destination: WorkerId | None = None
    via: str = ""


class MoveAborted(Event, frozen=True, tag=True, gc=False):
    """The request still runs only on the move's source; the destination's reservation is freed."""

    request: RequestId
    reason: str = ""
    destination: WorkerId | None = None


class MoveAsked(Event, frozen=True, tag=True, gc=False):
    """An operator asked for a move.  Answered by a `MoveRequest` if the request runs and the destination has room."""

    request: RequestId
    destination: WorkerId


class EpochStarted(Event, frozen=True, tag=True, gc=False):
    """A re-planning period begins: overloads are handled and batched operations carried out."""


class Command(Caused, frozen=True, tag=True, gc=False):
    """A decision, with its reason and the event that caused it."""

    reason: Reason


class PlaceRequest(Command, frozen=True, tag=True, gc=False):
    """Give the request to the worker (if the worker is still waking, the request waits for it)."""

    request: RequestId
    worker: WorkerId
    kv_bytes: int = 0


class QueueRequest(Command, frozen=True, tag=True, gc=False):
    """Queue the request until a later `PlaceRequest`: no worker has room."""

    request: RequestId


class RefuseRequest(Command, frozen=True, tag=True, gc=False):
    """Refuse the request with `melld.errors.RequestTooLarge`: it can never fit."""

    request: RequestId
    kv_bytes: int
    capacity_bytes: int


class ShedRequest(Command, frozen=True, tag=True, gc=False):
    """Shed the request, which has not begun: `QUEUE_FULL`, `WAITED_TOO_LONG` or `TOO_LATE`."""

    request: RequestId


class MoveRequest(Command, frozen=True, tag=True, gc=False):
    """Start to move the request.  It counts on both workers until `MoveCommitted` or `MoveAborted`.

    `urgency_s`: seconds until the source overflows if the request stays; infinity if it is not urgent.
    """

    request: RequestId
    source: WorkerId
    destination: WorkerId
    kv_bytes: int
    urgency_s: float = float("inf")
    after_first_token: bool = False
    """Hand over between the first token's step and the next, by KV: the prompt's blocks follow as it computes."""


class SuspendRequest(Command, frozen=True, tag=True, gc=False):
    """Take the request off its worker: it waits, and resumes from its tokens when it is placed again."""

    request: RequestId
    worker: WorkerId


class PromiseRoom(Command, frozen=True, tag=True, gc=False):
    """No action: memory that moves are about to free on the worker is reserved for the waiting request."""

    request: RequestId
    worker: WorkerId
    kv_bytes: int


class ActivateWorker(Command, frozen=True, tag=True, gc=False):
    """Wake the worker: it is about to get requests."""

    worker: WorkerId


class RetireWorker(Command, frozen=True, tag=True, gc=False):
    """Let the worker sleep: it has no requests and none are coming."""

    worker: WorkerId


class SetRole(Command, frozen=True, tag=True, gc=False):
    """No action: the worker has this role from now on."""

    worker: WorkerId
    role: Role


_OfRequests = RequestArrived | RequestsGrew | RequestFinished | RequestPreempted | RequestResumed
_OfWorkers = WorkerUp | WorkerSteadied | WorkerDown | WorkerDraining | WorkerResumed | WorkersPaced
_OfRoom = WorkerCapacityChanged | WorkerSharingChanged | WorkerSlotsChanged | WorkerWakeTimeChanged
AnyEvent = _OfRequests | _OfWorkers | _OfRoom | MoveCommitted | MoveAborted | MoveAsked | EpochStarted
_AboutRequest = PlaceRequest | QueueRequest | PromiseRoom | SuspendRequest | RefuseRequest | ShedRequest | MoveRequest
AnyCommand = _AboutRequest | ActivateWorker | RetireWorker | SetRole
