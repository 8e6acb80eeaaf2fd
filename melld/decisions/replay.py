"""Replay of a decision log: gives its facts to a fresh scheduler and compares the decisions.

Owns the conversion from records to events, and the comparison.  Never reads a file and never repairs a log.

A daemon's log names its policy and settings in the first record and records every epoch.  A simulation's does neither:
the caller gives policy and settings, and a step without facts is the beginning of an epoch, at a multiple of its
length.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, groupby
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
    happened = decisions = 0
    for step, found, epoch in _steps(rest, None if told else choice.epoch_s):
        try:
            event = epoch or as_event([record for record in found if not is_decision(record)])
            commands = scheduler.handle(event)
        except (IllegalTransition, ValueError, LookupError, TypeError) as error:
            raise UnusableLog(step, str(error)) from error
        happened += 1
        logged = [record for record in found if is_decision(record)]
        ways = {record["request"]: record["via"] for record in logged if record["kind"] == "move"}
        taken = recorder.take(event, commands, ways)
        decided = taken[len(taken) - len(commands) :]
        if decided != logged:
            return Replayed(policy, read[0], happened, decisions, _difference(step, logged, decided))
        decisions += len(logged)
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
    fact: dict[str, Any] = facts[0]
    at_s, request = fact["at"], fact.get("request", "")
    match fact["kind"]:
        case "epoch":
            return events.EpochStarted(at_s)
        case "arrive":
            sizes = fact["kv_bytes"], fact["prompt_tokens"]
            known = fact["priority"], fact.get("client", ""), fact.get("cached_tokens", {})
            return events.RequestArrived(at_s, request, *sizes, *known)
        case "grow":
            return events.RequestsGrew(at_s, {one["request"]: one["kv_bytes"] for one in facts})
        case "finish":
            return events.RequestFinished(at_s, request, fact.get("output_tokens", 0), fact.get("first_token_s", 0.0))
        case "preempt":
            return events.RequestPreempted(at_s, request)
        case "resumed":
            return events.RequestResumed(at_s, request, fact["pause_s"])
        case "moved" if fact["outcome"] == "committed":
            return events.MoveCommitted(at_s, request)
        case "moved":
            return events.MoveAborted(at_s, request, reason=fact["cause"])
        case "worker":
            return _worker_event(fact, tuple(one["worker"] for one in facts[1:]))
        case "pace":
            return events.WorkersPaced(at_s, {one["worker"]: _pace(one) for one in facts})
        case kind if kind in _PLAIN:
            make, names = _PLAIN[kind]
            event: AnyEvent = make(at_s, **{name: fact[name] for name in names})
            return event
    raise ValueError(f"unknown kind of record {fact['kind']!r}")


_PLAIN: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    kind: (event, names) for event, (kind, names) in PLAIN_FACTS.items()
}


def _pace(fact: Record) -> events.WorkerPace:
    return events.WorkerPace(**{name: fact[name] for name in events.WorkerPace.__struct_fields__})


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


def _difference(step: int, logged: list[Record], decided: list[Record]) -> Difference:
    for index in range(max(len(logged), len(decided))):
        theirs = logged[index] if index < len(logged) else None
        ours = decided[index] if index < len(decided) else None
        if theirs != ours:
            return Difference(step, theirs, ours)
    raise AssertionError((logged, decided))


def _counted(records: Iterable[Record], count: list[int]) -> Iterator[Record]:
    for record in records:
        count[0] += 1
        yield record
