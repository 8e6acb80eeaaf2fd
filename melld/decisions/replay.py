"""Replay of a decision log: gives its facts to a fresh scheduler and compares the decisions.

Owns the conversion from records to events, and the comparison.  Never reads a file and never repairs a log.

A daemon's log names its policy and settings in the first record and records every epoch.  A simulation's does neither:
the caller gives policy and settings, and a step without facts is the beginning of an epoch, at a multiple of its
length.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, groupby, zip_longest
from typing import Any

import msgspec

from melld.decisions.recorder import Recorder
from melld.decisions.records import PLAIN_FACTS, Record, is_decision
from melld.errors import IllegalTransition, MelldError
from melld.ids import NO_EVENT, EventId, WorkerId
from melld.scheduler import events
from melld.scheduler.events import AnyEvent
from melld.scheduler.policies.names import Policies
from melld.scheduler.scheduler import Scheduler, SchedulerSettings


class UnusableLog(MelldError):
    """The records are not a complete decision log."""

    code = "unusable_log"

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


class ReplaySettings(msgspec.Struct, frozen=True):
    """Scheduler of a replay.  `policy` None: the log's own, one of `policies`.

    `fallback` and `epoch_s`: for logs without their own.
    """

    policy: str | None
    fallback: Callable[[], Scheduler]
    epoch_s: float
    policies: Policies


def replay(records: Iterable[Record], choice: ReplaySettings) -> Replayed:
    """Give the log's facts to a scheduler, step by step, until a decision differs or the log ends.

    Raises:
        UnusableLog: the facts contradict each other, or are unknown to the scheduler.
    """
    read = [0]
    stream = _counted(records, read)
    first = next(stream, None)
    if first is None:
        raise UnusableLog(0, "it is empty")
    scheduler, policy, told = _scheduler_of(first, choice)
    rest = stream if first["kind"] == "scheduler" else chain([first], stream)
    if scheduler.settings.cluster.instant_moves:  # instant moves ended at once: the scheduler got no event
        rest = (record for record in rest if record["kind"] != "moved")
    recorder = Recorder()
    step = happened = decisions = 0
    try:
        for step, found, epoch in _steps(rest, None if told else choice.epoch_s):
            event = epoch or as_event([record for record in found if not is_decision(record)])
            commands = scheduler.handle(event)
            happened += 1
            recorder.facts(event)
            logged = [record for record in found if is_decision(record)]
            ways = {record["request"]: record["via"] for record in logged if record["kind"] == "move"}
            decided = [recorder.decision(event.at_s, command, ways) for command in commands]
            for pair in zip_longest(logged, decided):
                if pair[0] != pair[1]:
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
    "preempt": events.RequestPreempted,
    "resumed": events.RequestResumed,
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


def _scheduler_of(first: Record, choice: ReplaySettings) -> tuple[Scheduler, str, bool]:
    """Return the scheduler, its policy's name, and True if epochs are records."""
    if first.get("kind") != "scheduler":
        fresh = choice.fallback()
        return fresh, choice.policy or fresh.policy.name, False
    name = choice.policy or str(first["policy"])
    if name not in choice.policies:
        raise UnusableLog(0, f"its policy {name!r} is unknown")
    try:
        return Scheduler(choice.policies[name], msgspec.convert(first["settings"], SchedulerSettings)), name, True
    except msgspec.ValidationError as error:
        raise UnusableLog(0, f"its settings are of another version: {error}") from error


Step = tuple[int, list[Record], AnyEvent | None]


def _steps(records: Iterable[Record], epoch_s: float | None) -> Iterator[Step]:
    """Yield the records of each step; with `epoch_s`, steps without facts or records are epochs."""
    epochs, before = 0, 0
    for step, group in groupby(records, key=lambda record: int(record.get("step", 0))):
        found = list(group)
        if epoch_s is None:
            yield step, found, None
            continue
        for silent in range(before + 1, step):
            yield silent, [], events.EpochStarted(epochs * epoch_s, id=EventId(silent))
            epochs += 1
        before = step
        if all(is_decision(record) for record in found):
            yield step, found, events.EpochStarted(epochs * epoch_s, id=EventId(step))
            epochs += 1
        else:
            yield step, found, None


def _counted(records: Iterable[Record], count: list[int]) -> Iterator[Record]:
    for record in records:
        count[0] += 1
        yield record
