"""Replay of a decision log: gives its facts to a fresh scheduler and compares the decisions.

Owns the conversion from records to events, and the comparison.  Never reads a file and never repairs a log.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, zip_longest
from typing import Any

import msgspec

from melld.decisions.recorder import decision
from melld.decisions.records import PLAIN_FACTS, Record, is_decision
from melld.errors import IllegalTransition, MelldError
from melld.ids import NO_EVENT, WorkerId
from melld.scheduler import events
from melld.scheduler.events import AnyEvent
from melld.scheduler.policies.names import Policies
from melld.scheduler.scheduler import Scheduler, SchedulerSettings


class UnusableLog(MelldError):
    """The records are not a complete decision log."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step} of the decision log cannot be replayed: {why}")


class Difference(msgspec.Struct, frozen=True):
    """The first step at which the scheduler and the log differ; None: no further decision."""

    step: int
    logged: Record | None
    decided: Record | None


class Replayed(msgspec.Struct, frozen=True):
    """Result of a replay: how far the log and the scheduler agree."""

    policy: str
    records: int
    events: int
    decisions: int
    difference: Difference | None


def replay(records: Iterable[Record], policies: Policies, policy: str | None = None) -> Replayed:
    """Give the log's facts to a scheduler, step by step, until a decision differs or the log ends.

    A daemon that was killed may have written a part of its last step: what is missing there does not differ.

    `policy`: one of `policies`; None: the log's own.

    Raises:
        UnusableLog: the facts contradict each other, or are unknown to the scheduler.
    """
    read = [0]
    stream = _counted(records, read)
    first = next(stream, None)
    if first is None:
        raise UnusableLog(0, "it is empty")
    if first["kind"] != "scheduler":
        raise UnusableLog(0, "its first record does not name a scheduler")
    policy = policy or str(first.get("policy"))
    scheduler = _scheduler_of(first, policies, policy)
    rest: Iterable[Record] = stream
    if scheduler.settings.cluster.instant_moves:  # instant moves ended at once: the scheduler got no event
        rest = (record for record in stream if record["kind"] != "moved")
    step = happened = decisions = 0
    missing: Difference | None = None
    try:
        for step, group in groupby(rest, key=lambda record: int(record.get("step", 0))):
            if missing is not None:
                return Replayed(policy, read[0], happened, decisions, missing)
            found = list(group)
            event = as_event([record for record in found if not is_decision(record)])
            commands = scheduler.handle(event)
            happened += 1
            logged = [record for record in found if is_decision(record)]
            ways = {record["request"]: record["via"] for record in logged if record["kind"] == "move"}
            decided = [decision(event, command, ways) for command in commands]
            for pair in zip_longest(logged, decided):
                if pair[0] is None:
                    missing = missing or Difference(step, *pair)
                elif pair[0] != pair[1]:
                    return Replayed(policy, read[0], happened, decisions, Difference(step, *pair))
            decisions += len(logged)
    except (IllegalTransition, ValueError, LookupError, TypeError) as error:
        raise UnusableLog(step, str(error)) from error
    return Replayed(policy, read[0], happened, decisions, None)


def as_event(facts: list[Record]) -> AnyEvent:
    """Return the event that the facts of one step record.

    Raises:
        ValueError: there are none, or they are unknown.
    """
    if not facts:
        raise ValueError("it holds no fact")
    ids = {"id": facts[0].get("step", NO_EVENT), "cause": facts[0].get("cause_step", NO_EVENT)}
    return msgspec.structs.replace(_event_of(facts), **ids)


def _event_of(facts: list[Record]) -> AnyEvent:
    fact = facts[0]
    at_s = fact["at"]
    match fact["kind"]:
        case "grow":
            return events.RequestsGrew(at_s, {one["request"]: one["kv_bytes"] for one in facts})
        case "moved" if fact["outcome"] == "committed":
            return events.MoveCommitted(at_s, fact["request"])
        case "moved":
            return events.MoveAborted(at_s, fact["request"], reason=fact["cause"])
        case "worker":
            return _worker_event(fact, tuple(one["worker"] for one in facts[1:]))
        case "pace":
            paces = {one["worker"]: msgspec.convert(one, events.WorkerPace) for one in facts}
            return events.WorkersPaced(at_s, paces)
        case kind if kind in _NAMED_ALIKE:
            return msgspec.convert({**fact, "at_s": at_s}, _NAMED_ALIKE[kind])
    raise ValueError(f"unknown kind of record {fact['kind']!r}")


_NAMED_ALIKE: Mapping[str, type[AnyEvent]] = {
    "arrive": events.RequestArrived,
    "finish": events.RequestFinished,
    **{kind: event for event, (kind, _) in PLAIN_FACTS.items()},
}
"""Events whose fields are the record's."""


def _worker_event(fact: dict[str, Any], others: tuple[WorkerId, ...]) -> AnyEvent:
    at_s, worker, capacity_bytes = fact["at"], fact["worker"], fact["capacity_bytes"]
    if "machine" in fact:
        offered = fact["slots"], fact["machine"], fact.get("block_bytes", 0)
        return events.WorkerUp(at_s, worker, capacity_bytes, *offered, steady=fact.get("steady", True))
    if "slots" in fact:
        return events.WorkerSlotsChanged(at_s, worker, fact["slots"])
    if "gone" in fact:
        return events.WorkerDown(at_s, worker, others)
    return events.WorkerCapacityChanged(at_s, worker, capacity_bytes)


def _scheduler_of(header: Record, policies: Policies, policy: str) -> Scheduler:
    if policy not in policies:
        raise UnusableLog(0, f"its policy {policy!r} is unknown")
    try:
        return Scheduler(policies[policy], msgspec.convert(header.get("settings"), SchedulerSettings))
    except msgspec.ValidationError as error:
        raise UnusableLog(0, f"its settings are of another version: {error}") from error


def _counted(records: Iterable[Record], count: list[int]) -> Iterator[Record]:
    for record in records:
        count[0] += 1
        yield record
