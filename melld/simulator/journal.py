"""What a simulation writes to its decision log: each fact, then what was decided on it, under one step number.

Owns the sink; never changes what it writes of.
"""

from collections.abc import Callable

from melld.decisions.records import Record, decision_record, fact_records, preempted_record
from melld.migrate.snapshot import Via
from melld.scheduler.events import AnyCommand, AnyEvent, MoveRequest, PlaceRequest, RequestPreempted
from melld.simulator.fleet import Fleet
from melld.simulator.planning import MovePlanning

Sink = Callable[[Record], None]


class Journal:
    """The log of one simulation."""

    def __init__(self, sink: Sink, fleet: Fleet, planning: MovePlanning | None) -> None:
        self._sink = sink
        self._fleet = fleet
        self._planning = planning

    def fact(self, event: AnyEvent) -> None:
        """Something has happened."""
        if isinstance(event, RequestPreempted):
            worker = self._fleet.names[self._fleet.runs[event.request].worker]
            self._sink(preempted_record(event, worker))
            return
        for record in fact_records(event):
            self._sink(record)

    def decision(self, now_s: float, command: AnyCommand) -> None:
        """The scheduler has decided, and what it wants is about to be done."""
        kv_bytes, via = 0, Via.KV
        if isinstance(command, PlaceRequest):
            kv_bytes = self._fleet.runs[command.request].prompt_bytes
        elif isinstance(command, MoveRequest) and self._planning is not None:
            via = self._planning.way_of(command.request)
        self._sink(decision_record(now_s, command, kv_bytes, via))
