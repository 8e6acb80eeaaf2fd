"""Records of the decision log: one JSON object per line, enough to audit every decision without melld's code.

Owns the encoding of facts and decisions; never writes a file (`file` and the simulator's caller do) and never decides.
docs/decision-log.md lists the kinds of records and their keys.

`step` is the id of an event: records of one step are one event and the decisions on it.  `cause_step` of a fact is the
event that caused it: for the end of a move, the one on which the move was decided.
"""

from collections.abc import Iterator, Mapping
from typing import IO, Any

import msgspec

from melld.errors import ConfigError
from melld.ids import NO_EVENT, EventId
from melld.scheduler import events
from melld.scheduler.events import AnyCommand, AnyEvent

Record = dict[str, Any]
_encoder = msgspec.json.Encoder()
Form = tuple[str, tuple[str, ...]]
"""Kind of a record, and the fields that it takes as they are."""
DECIDED: Mapping[type, Form] = {
    events.PlaceRequest: ("place", ("request", "worker", "kv_bytes")),
    events.QueueRequest: ("queue", ("request",)),
    events.PromiseRoom: ("promise", ("request", "worker", "kv_bytes")),
    events.SuspendRequest: ("suspend", ("request", "worker")),
    events.MoveRequest: ("move", ("request", "source", "destination", "kv_bytes")),
    events.RefuseRequest: ("finish", ("request", "kv_bytes", "capacity_bytes")),
    events.ShedRequest: ("finish", ("request",)),
    events.ActivateWorker: ("activate", ("worker",)),
    events.RetireWorker: ("retire", ("worker",)),
    events.SetRole: ("role", ("worker", "role")),
}
DECISIONS = frozenset(kind for kind, _ in DECIDED.values()) - {"finish"}
PLAIN_FACTS: Mapping[type, Form] = {
    events.WorkerSteadied: ("steady", ("worker",)),
    events.WorkerSharingChanged: ("share", ("worker", "shared_bytes")),
    events.WorkerWakeTimeChanged: ("wake", ("worker", "wake_s")),
    events.WorkerDraining: ("drain", ("worker",)),
    events.WorkerResumed: ("resume", ("worker",)),
    events.MoveAsked: ("ask", ("request", "destination")),
    events.EpochStarted: ("epoch", ()),
    events.RequestPreempted: ("preempt", ("request", "worker", "kv_bytes")),
    events.RequestResumed: ("resumed", ("request", "worker", "pause_s")),
    events.WorkerCapacityChanged: ("worker", ("worker", "capacity_bytes")),
    events.WorkerSlotsChanged: ("worker", ("worker", "capacity_bytes", "slots")),
}
"""Events that are one record with the same fields, and at most one that they lack."""


def encode(record: Record) -> bytes:
    """Return the record as one line, with its line feed.  Equal records give equal bytes."""
    return _encoder.encode(record) + b"\n"


def read(file: IO[bytes]) -> Iterator[Record]:
    """Yield a log's records; skip a last line that is cut off.

    Raises:
        ConfigError: a line is no record.
    """
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record = msgspec.json.decode(line, type=Record)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{file.name}:{number}", f"not a record of a decision log: {error}") from error
        if not {"at", "kind"} <= record.keys():
            raise ConfigError(f"{file.name}:{number}", "not a record of a decision log: it has no `at` or no `kind`")
        yield record


def fact_records(event: AnyEvent, **known: Any) -> list[Record]:
    """Return the records of an event, such as one per request that grew; `known`: what it lacks."""
    records = [_stamped(event.at_s, kind, rest, event.id) for kind, rest in _told(event, known)]
    if event.cause:
        for record in records:
            record["cause_step"] = event.cause
    return records


def decision_record(at_s: float, command: AnyCommand, via: str = "kv") -> Record:
    """Return the record of a decision.  `via`: the way of a move."""
    kind, names = DECIDED[type(command)]
    rest: Record = _fields(command, *names)
    if isinstance(command, events.MoveRequest):
        rest["via"] = via
    rest["cause"] = "refused" if isinstance(command, events.RefuseRequest) else command.reason
    return _stamped(at_s, kind, rest, command.cause)


def header_record(policy: str, settings: msgspec.Struct, at_s: float, unix_s: float | None, version: str) -> Record:
    """Return the first record: the policy, its settings, and the wall-clock time at `at_s`; None: it is simulated."""
    rest = {"policy": policy, "settings": msgspec.to_builtins(settings)}
    return _stamped(at_s, "scheduler", {**rest, "unix_s": unix_s, "melld": version}, NO_EVENT)


def is_decision(record: Record) -> bool:
    """Return True if the record is a decision of the scheduler, not a fact."""
    return record["kind"] in DECISIONS or (record["kind"] == "finish" and "cause" in record)


def _stamped(at_s: float, kind: str, rest: Record, step: EventId) -> Record:
    record: Record = {"at": at_s, "kind": kind, **rest}
    if step:
        record["step"] = step
    return record


def _fields(message: msgspec.Struct, *names: str) -> Record:
    return {name: getattr(message, name) for name in names}


def _told(event: AnyEvent, known: Record) -> Iterator[tuple[str, Record]]:
    """Yield the kind and the fields of each record of the event."""
    match event:
        case events.RequestArrived():
            rest = _fields(event, "request", "kv_bytes", "prompt_tokens", "priority")
            optional = _fields(event, "client", "cached_tokens")
            yield "arrive", rest | {name: value for name, value in optional.items() if value}
        case events.RequestsGrew():
            for request, kv_bytes in event.kv_bytes.items():
                yield "grow", {"request": request, "kv_bytes": kv_bytes}
        case events.RequestFinished():
            yield "finish", _fields(event, "request", *(("output_tokens", "first_token_s") * bool(event.output_tokens)))
        case events.MoveCommitted():
            via = {"via": event.via} if event.via else {}
            yield "moved", {"request": event.request, "outcome": "committed", "cause": "", **via}
        case events.MoveAborted():
            yield "moved", {"request": event.request, "outcome": "aborted", "cause": event.reason}
        case events.WorkerUp():
            rest = _fields(event, "worker", "capacity_bytes", "slots", "machine", "block_bytes")
            yield "worker", rest if event.steady else {**rest, "steady": False}
        case events.WorkerDown():
            gone = known.get("workers", event.workers)
            yield from (("worker", {"worker": one, "capacity_bytes": 0, "gone": True}) for one in gone)
        case events.WorkerDraining() if event.lent_to:
            yield "drain", _fields(event, "worker", "lent_to")
        case events.WorkersPaced():
            yield from (("pace", {"worker": one, **msgspec.structs.asdict(pace)}) for one, pace in event.paces.items())
        case _ if type(event) in PLAIN_FACTS:
            kind, names = PLAIN_FACTS[type(event)]
            yield kind, {name: known[name] if name in known else getattr(event, name) for name in names}
