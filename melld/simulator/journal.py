"""Writer of a simulation's decision log: each fact, then the decisions on it, under one step number.

Owns the sink; never changes what it records.
"""

from collections.abc import Callable

from melld.decisions.records import Record, decision_record, fact_records, worker_record
from melld.migrate.snapshot import Via
from melld.scheduler.events import AnyCommand, AnyEvent, MoveRequest, PlaceRequest, RequestPreempted
from melld.simulator.fleet import SimulatedFleet
from melld.simulator.planning import MovePlanning

Sink = Callable[[Record], None]


class Journal:
    """Decision log of one simulation."""

    def __init__(self, sink: Sink, fleet: SimulatedFleet, planning: MovePlanning | None) -> None:
        self._sink = sink
        self._fleet = fleet
        self._planning = planning

    def fact(self, event: AnyEvent) -> None:
        """Record a fact."""
        if isinstance(event, RequestPreempted):
            worker = self._fleet.names[self._fleet.runs[event.request].worker]
            self._sink(worker_record(event, worker))
            return
        for record in fact_records(event):
            self._sink(record)

    def decision(self, now_s: float, command: AnyCommand) -> None:
        """Record a decision that is about to be carried out."""
        kv_bytes, via = 0, Via.KV
        if isinstance(command, PlaceRequest):
            kv_bytes = self._fleet.kv_bytes(self._fleet.runs[command.request])
        elif isinstance(command, MoveRequest) and self._planning is not None:
            via = self._planning.way_of(command.request)
        self._sink(decision_record(now_s, command, kv_bytes, via))
