"""The decision log: one JSON object a line, from which an outsider can audit every decision without our code.

Owns the encoding of facts and decisions; never writes a file (the daemon's shell and the simulator's caller do) and
never decides.  Records have the keys `at` (seconds) and `kind`, and then:

    worker    worker, capacity_bytes (zero: it is gone and its requests have no worker), slots
    share     worker, shared_bytes: so much less than the sum of its requests' sizes is used there
    arrive    request, kv_bytes, prompt_tokens, priority; client, where there are several (a name for its API key)
    place     request, worker, kv_bytes, cause
    queue     request, cause
    grow      request, kv_bytes
    move      request, source, destination, kv_bytes, via ("kv" or "tokens"), cause
    moved     request, outcome ("committed" or "aborted"), cause; between the two the request counts on both workers;
              the daemon's, committed, with via: the way that it went in the end
    preempt   request, worker; it holds nothing there until its next `grow`, and then all of it again
    finish    request; with cause "refused", kv_bytes and capacity_bytes if it never could have run; with cause
              "queue full" or "waited too long" if it was sent away before it had begun
    activate  worker, cause
    retire    worker, cause

and, from the daemon, what else its scheduler was told; none of it changes a size or a place:

    scheduler policy, settings, epochs ("told"), unix_s, melld: the first record
    epoch     the period of re-planning begins
    ask       request, destination: an operator wants it there
    drain     worker;  resume  worker
    wake      worker, wake_s: how long it takes to wake it; 0 while its process is warm

`step` is the id of an event: records of one step are one event and what was decided on it.  `cause_step`, where a
fact has it, is the event that brought it about: for the end of a move, the one on which the move was decided.  In the
simulator's log a step without a fact of its own is the beginning of an epoch, and one that decided nothing leaves no
record; in the daemon's an epoch is a record.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from melld.ids import NO_EVENT, EventId, WorkerId
from melld.scheduler import events
from melld.scheduler.events import AnyCommand, AnyEvent

Record = dict[str, Any]
_encoder = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """The record as one line, with its line feed.  Equal records give equal bytes."""
    return _encoder.encode(record) + b"\n"


def fact_records(event: AnyEvent) -> list[Record]:
    """What the event tells an auditor: nothing for the beginning of an epoch, one record per request that grew.

    Preemptions and changes of slots have functions of their own: their events do not say all.
    """
    write = _FACTS.get(type(event))
    if write is None:
        return []
    return [_fact(event, kind, rest) for kind, rest in write(event)]


def decision_record(at_s: float, command: AnyCommand, kv_bytes: int = 0, via: str = "kv") -> Record:
    """What was decided.  `kv_bytes` is the request's present size (for a placement), `via` the way of a move."""
    rest: Record
    match command:
        case events.PlaceRequest():
            kind, rest = "place", {"request": command.request, "worker": command.worker, "kv_bytes": kv_bytes}
        case events.QueueRequest():
            kind, rest = "queue", {"request": command.request}
        case events.MoveRequest():
            kind = "move"
            rest = {
                "request": command.request,
                "source": command.source,
                "destination": command.destination,
                "kv_bytes": command.kv_bytes,
                "via": via,
            }
        case events.RefuseRequest():
            refused = {"kv_bytes": command.kv_bytes, "capacity_bytes": command.capacity_bytes, "cause": "refused"}
            return _stamped(at_s, "finish", {"request": command.request, **refused}, command.cause)
        case events.ShedRequest():
            kind, rest = "finish", {"request": command.request}
        case events.ActivateWorker():
            kind, rest = "activate", {"worker": command.worker}
        case events.RetireWorker():
            kind, rest = "retire", {"worker": command.worker}
    return _stamped(at_s, kind, {**rest, "cause": command.reason}, command.cause)


def header_record(policy: str, settings: msgspec.Struct, at_s: float, unix_s: float, version: str) -> Record:
    """The first record of a daemon's log: who decides, and what o'clock it is at `at_s`."""
    rest = {"policy": policy, "settings": msgspec.to_builtins(settings), "epochs": "told"}
    return _stamped(at_s, "scheduler", {**rest, "unix_s": unix_s, "melld": version}, NO_EVENT)


def slots_record(event: events.WorkerSlotsChanged, capacity_bytes: int) -> Record:
    """The worker runs more or fewer requests at once than before; its capacity is repeated."""
    rest = {"worker": event.worker, "capacity_bytes": capacity_bytes, "slots": event.slots}
    return _fact(event, "worker", rest)


def epoch_record(event: events.EpochStarted) -> Record:
    """An epoch began."""
    return _fact(event, "epoch", {})


def preempted_record(event: events.RequestPreempted, worker: WorkerId) -> Record:
    """The worker itself has pushed the request out of its running set."""
    return _fact(event, "preempt", {"request": event.request, "worker": worker})


def _fact(event: AnyEvent, kind: str, rest: Record) -> Record:
    record = _stamped(event.at_s, kind, rest, event.id)
    if event.cause:
        record["cause_step"] = event.cause
    return record


def _stamped(at_s: float, kind: str, rest: Record, step: EventId) -> Record:
    record: Record = {"at": at_s, "kind": kind, **rest}
    if step:
        record["step"] = step
    return record


def _arrived(event: events.RequestArrived) -> list[tuple[str, Record]]:
    client = {"client": event.client} if event.client else {}
    return [
        (
            "arrive",
            {
                "request": event.request,
                "kv_bytes": event.kv_bytes,
                "prompt_tokens": event.prompt_tokens,
                "priority": event.priority,
                **client,
            },
        )
    ]


def _moved(event: events.MoveCommitted | events.MoveAborted) -> list[tuple[str, Record]]:
    if isinstance(event, events.MoveAborted):
        return [("moved", {"request": event.request, "outcome": "aborted", "cause": event.reason})]
    via = {"via": event.via} if event.via else {}
    return [("moved", {"request": event.request, "outcome": "committed", "cause": "", **via})]


def _worker(event: events.WorkerUp) -> list[tuple[str, Record]]:
    rest = {"worker": event.worker, "capacity_bytes": event.capacity_bytes, "slots": event.slots}
    unsteady = {} if event.steady else {"steady": False}
    return [("worker", {**rest, "machine": event.machine, "block_bytes": event.block_bytes, **unsteady})]


_FACTS: Mapping[type, Callable[[Any], list[tuple[str, Record]]]] = {
    events.RequestArrived: _arrived,
    events.RequestsGrew: lambda event: [
        ("grow", {"request": request, "kv_bytes": kv_bytes}) for request, kv_bytes in event.kv_bytes.items()
    ],
    events.RequestFinished: lambda event: [("finish", {"request": event.request})],
    events.WorkerUp: _worker,
    events.WorkerSteadied: lambda event: [("steady", {"worker": event.worker})],
    events.WorkerDown: lambda event: [("worker", {"worker": event.worker, "capacity_bytes": 0})],
    events.WorkerCapacityChanged: lambda event: [
        ("worker", {"worker": event.worker, "capacity_bytes": event.capacity_bytes})
    ],
    events.WorkerSharingChanged: lambda event: [
        ("share", {"worker": event.worker, "shared_bytes": event.shared_bytes})
    ],
    events.MoveCommitted: _moved,
    events.MoveAborted: _moved,
    events.MoveAsked: lambda event: [("ask", {"request": event.request, "destination": event.destination})],
    events.WorkerWakeTimeChanged: lambda event: [("wake", {"worker": event.worker, "wake_s": event.wake_s})],
    events.WorkerDraining: lambda event: [("drain", {"worker": event.worker})],
    events.WorkerResumed: lambda event: [("resume", {"worker": event.worker})],
}
