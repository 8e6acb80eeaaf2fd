"""Records of the decision log: one JSON object per line, enough to audit every decision without melld's code.

Owns the encoding of facts and decisions; never writes a file (`file` and the simulator's caller do) and never decides.
Records have the keys `at` (seconds) and `kind`, and then:

    worker    worker, capacity_bytes (zero: it is gone and its requests have no worker), slots
    share     worker, shared_bytes: bytes that sharing saves there, out of the sum of its requests' sizes
    arrive    request, kv_bytes, prompt_tokens, priority; client, where there are several (a name for its API key);
              cached_tokens, where workers may have the prompt's beginning: how many tokens, by worker
    place     request, worker, kv_bytes, cause
    queue     request, cause
    grow      request, kv_bytes
    promise   request, worker, kv_bytes, cause: so much of the worker's room is kept for the waiting request
    suspend   request, worker, cause: it has no worker now, and resumes from its tokens when it is placed
    move      request, source, destination, kv_bytes, via ("kv" or "tokens"), cause
    moved     request, outcome ("committed" or "aborted"), cause; between move and moved the request counts on both
              workers; a daemon's committed record has via, the way that the move took in the end
    preempt   request, worker; the request holds nothing there until its next `grow`, and then all of it again
    finish    request; output_tokens and first_token_s (zero: none came), where they are told; with cause "refused",
              kv_bytes and capacity_bytes if it could never run; with cause "queue full", "waited too long" or
              "too late" if it was shed before it had begun
    activate  worker, cause
    retire    worker, cause
    role      worker, role ("mixed", "prefill", "decode"), cause: what it is for from now on, "mixed" at first

A daemon's log also has the other events of its scheduler; none of them changes a size or a place:

    scheduler policy, settings, epochs ("told"), unix_s, melld: the first record
    epoch     a re-planning period begins
    ask       request, destination: an operator wants it there
    drain     worker;  resume  worker
    resumed   request, worker, pause_s: its client gets tokens again, this long after the last one
    wake      worker, wake_s: seconds to wake it; 0 while its process is warm
    pace      worker, step_s, decodes, kv_bytes, prompts, prompt_tokens, prefill_s: what its steps took

`step` is the id of an event: records of one step are one event and the decisions on it.  `cause_step` of a fact is the
event that caused it: for the end of a move, the one on which the move was decided.  In a simulator's log a step without
a fact is the beginning of an epoch, and an epoch without decisions leaves no record; in a daemon's an epoch is a
record.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from melld.ids import NO_EVENT, EventId, WorkerId
from melld.scheduler import events
from melld.scheduler.events import AnyCommand, AnyEvent

Record = dict[str, Any]
_encoder = msgspec.json.Encoder()
DECISIONS = frozenset({"place", "queue", "promise", "suspend", "move", "activate", "retire", "role"})


def encode(record: Record) -> bytes:
    """Return the record as one line, with its line feed.  Equal records give equal bytes."""
    return _encoder.encode(record) + b"\n"


def fact_records(event: AnyEvent) -> list[Record]:
    """Return the records of an event: none for the beginning of an epoch, one per request that grew.

    Preemptions and changes of slots have separate functions: their events lack some of the facts.
    """
    write = _FACTS.get(type(event))
    if write is None:
        return []
    return [_fact(event, kind, rest) for kind, rest in write(event)]


def decision_record(at_s: float, command: AnyCommand, kv_bytes: int = 0, via: str = "kv") -> Record:
    """Return the record of a decision.  `kv_bytes`: the request's size (for a placement); `via`: the way of a move."""
    rest: Record
    match command:
        case events.PlaceRequest():
            kind, rest = "place", {"request": command.request, "worker": command.worker, "kv_bytes": kv_bytes}
        case events.QueueRequest():
            kind, rest = "queue", {"request": command.request}
        case events.PromiseRoom():
            kind = "promise"
            rest = {"request": command.request, "worker": command.worker, "kv_bytes": command.kv_bytes}
        case events.SuspendRequest():
            kind, rest = "suspend", {"request": command.request, "worker": command.worker}
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
        case events.SetRole():
            kind, rest = "role", {"worker": command.worker, "role": command.role}
    return _stamped(at_s, kind, {**rest, "cause": command.reason}, command.cause)


def header_record(policy: str, settings: msgspec.Struct, at_s: float, unix_s: float, version: str) -> Record:
    """Return the first record of a daemon's log: the policy, its settings, and the wall-clock time at `at_s`."""
    rest = {"policy": policy, "settings": msgspec.to_builtins(settings), "epochs": "told"}
    return _stamped(at_s, "scheduler", {**rest, "unix_s": unix_s, "melld": version}, NO_EVENT)


def slots_record(event: events.WorkerSlotsChanged, capacity_bytes: int) -> Record:
    """Return the record of a worker's new slots; it repeats the capacity."""
    rest = {"worker": event.worker, "capacity_bytes": capacity_bytes, "slots": event.slots}
    return _fact(event, "worker", rest)


def epoch_record(event: events.EpochStarted) -> Record:
    """Return the record of an epoch's beginning."""
    return _fact(event, "epoch", {})


def worker_record(event: events.RequestPreempted | events.RequestResumed, worker: WorkerId) -> Record:
    """Return the record of a preemption by the worker, or of a request's first tokens after a pause."""
    rest: Record = {"request": event.request, "worker": worker}
    if isinstance(event, events.RequestResumed):
        return _fact(event, "resumed", {**rest, "pause_s": event.pause_s})
    return _fact(event, "preempt", rest)


def is_decision(record: Record) -> bool:
    """Return True if the record is a decision of the scheduler, not a fact."""
    return record["kind"] in DECISIONS or (record["kind"] == "finish" and "cause" in record)


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
    cached = {"cached_tokens": dict(event.cached_tokens)} if event.cached_tokens else {}
    return [
        (
            "arrive",
            {
                "request": event.request,
                "kv_bytes": event.kv_bytes,
                "prompt_tokens": event.prompt_tokens,
                "priority": event.priority,
                **client,
                **cached,
            },
        )
    ]


def _finished(event: events.RequestFinished) -> list[tuple[str, Record]]:
    tokens = {"output_tokens": event.output_tokens, "first_token_s": event.first_token_s} if event.output_tokens else {}
    return [("finish", {"request": event.request, **tokens})]


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
    events.RequestFinished: _finished,
    events.WorkerUp: _worker,
    events.WorkerSteadied: lambda event: [("steady", {"worker": event.worker})],
    events.WorkerDown: lambda event: [("worker", {"worker": one, "capacity_bytes": 0}) for one in event.workers],
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
    events.WorkersPaced: lambda event: [
        ("pace", {"worker": worker, **msgspec.structs.asdict(pace)}) for worker, pace in event.paces.items()
    ],
    events.WorkerDraining: lambda event: [("drain", {"worker": event.worker})],
    events.WorkerResumed: lambda event: [("resume", {"worker": event.worker})],
}
