"""Recorder: turns the scheduler's events and commands into records of the decision log.

Events that the scheduler ignores (the late end of a move, the end of an unknown request) leave no record, so that the
records alone hold all that the scheduler acted upon.  Never writes a file.
"""

from collections.abc import Callable, Mapping, Sequence

from melld.decisions.records import Record, decision_record, fact_records
from melld.ids import RequestId
from melld.scheduler.events import AnyCommand, AnyEvent
from melld.scheduler.scheduler import Scheduler

NONE_MOVES: Mapping[RequestId, str] = {}


class Recorder:
    """Makes the records of one scheduler's events.  Call `take` after each, before the next."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def take(
        self, event: AnyEvent, commands: Sequence[AnyCommand], ways: Mapping[RequestId, str] = NONE_MOVES
    ) -> list[Record]:
        """Return the records of one event.  `ways` names the way ("kv", "tokens") of the moves among the commands."""
        return self.facts(event) + [decision(event, command, ways) for command in commands]

    def facts(self, event: AnyEvent) -> list[Record]:
        """Return the records of the event alone."""
        known = self._scheduler.known
        return [] if known is None else fact_records(event, **known)


def decision(event: AnyEvent, command: AnyCommand, ways: Mapping[RequestId, str] = NONE_MOVES) -> Record:
    """Return the record of one decision on an event."""
    return decision_record(event.at_s, command, ways.get(getattr(command, "request", RequestId("")), "kv"))


def recording(scheduler: Scheduler, *keepers: Callable[[Sequence[Record]], None]) -> Callable[..., None]:
    """Return a tap for the driver that makes each event's records once and gives them to all keepers."""
    recorder = Recorder(scheduler)

    def heard(event: AnyEvent, commands: Sequence[AnyCommand], ways: Mapping[RequestId, str]) -> None:
        records = recorder.take(event, commands, ways)
        for keep in keepers:
            keep(records)

    return heard
