"""Recorder: turns the scheduler's events and commands into records of the decision log.

Owns what a record needs beyond its event: owners, moves under way, capacities.  Never writes a file.
Events that the scheduler ignores (the late end of a move, the end of an unknown request) leave no record, so that the
records alone hold all that the scheduler acted upon.
"""

from collections.abc import Callable, Mapping, Sequence

from melld.decisions.records import Record, decision_record, fact_records
from melld.ids import RequestId, WorkerId
from melld.scheduler import events
from melld.scheduler.events import AnyCommand, AnyEvent

NOBODY: Mapping[RequestId, str] = {}


class Recorder:
    """The part of the scheduler's state that the log needs.  Takes every event with its commands, in order."""

    def __init__(self) -> None:
        self._unfinished: set[RequestId] = set()
        self._worker: dict[RequestId, WorkerId] = {}
        self._destination: dict[RequestId, WorkerId] = {}  # of those that move
        self._capacity_bytes: dict[WorkerId, int] = {}

    def take(
        self, event: AnyEvent, commands: Sequence[AnyCommand], ways: Mapping[RequestId, str] = NOBODY
    ) -> list[Record]:
        """Return the records of one event.  `ways` names the way ("kv", "tokens") of the moves among the commands."""
        records = self.facts(event)
        records += [self.decision(event.at_s, command, ways) for command in commands]
        return records

    def facts(self, event: AnyEvent) -> list[Record]:
        """Return the records of an event alone."""
        match event:
            case events.RequestArrived():
                self._unfinished.add(event.request)
            case events.RequestFinished():
                if event.request not in self._unfinished:
                    return []
                self._unfinished.remove(event.request)
                self._worker.pop(event.request, None)
                self._destination.pop(event.request, None)
            case events.RequestPreempted() | events.RequestResumed():
                worker = self._worker.get(event.request)
                return [] if worker is None else fact_records(event, worker=worker)
            case events.MoveCommitted() | events.MoveAborted():
                if not self._end_move(event):
                    return []
            case events.WorkerUp():
                self._capacity_bytes[event.worker] = event.capacity_bytes
            case events.WorkerSharingChanged() | events.WorkerSteadied():
                return fact_records(event) if event.worker in self._capacity_bytes else []
            case events.WorkerCapacityChanged() | events.WorkerSlotsChanged():
                return self._worker_changed(event)
            case events.WorkerDown():
                return self._workers_lost(event)
        return fact_records(event)

    def _end_move(self, event: events.MoveCommitted | events.MoveAborted) -> bool:
        """End the current move; return False if the event belongs to another."""
        destination = self._destination.get(event.request)
        if destination is None or event.destination not in (None, destination):
            return False
        del self._destination[event.request]
        if isinstance(event, events.MoveCommitted):
            self._worker[event.request] = destination
        return True

    def _worker_changed(self, event: events.WorkerCapacityChanged | events.WorkerSlotsChanged) -> list[Record]:
        worker = event.worker
        if worker not in self._capacity_bytes:
            return []
        if isinstance(event, events.WorkerSlotsChanged):
            return fact_records(event, capacity_bytes=self._capacity_bytes[worker])
        self._capacity_bytes[worker] = event.capacity_bytes
        return fact_records(event)

    def _workers_lost(self, event: events.WorkerDown) -> list[Record]:
        gone = [worker for worker in event.workers if self._capacity_bytes.pop(worker, None) is not None]
        lost = {request for request, where in self._worker.items() if where in gone}
        for request in lost:
            del self._worker[request]
        moving = self._destination.items()
        self._destination = {one: there for one, there in moving if there not in gone and one not in lost}
        return [record for record in fact_records(event) if record["worker"] in gone]

    def decision(self, at_s: float, command: AnyCommand, ways: Mapping[RequestId, str] = NOBODY) -> Record:
        """Return the record of one decision on the last event."""
        match command:
            case events.PlaceRequest():
                self._worker[command.request] = command.worker
            case events.MoveRequest():
                self._destination[command.request] = command.destination
                return decision_record(at_s, command, ways.get(command.request, "kv"))
            case events.SuspendRequest():
                self._worker.pop(command.request, None)
            case events.RefuseRequest() | events.ShedRequest():
                self._unfinished.discard(command.request)
        return decision_record(at_s, command)


def recording(*keepers: Callable[[Sequence[Record]], None]) -> Callable[..., None]:
    """Return a tap for the driver that makes each event's records once and gives them to all keepers."""
    recorder = Recorder()

    def heard(event: AnyEvent, commands: Sequence[AnyCommand], ways: Mapping[RequestId, str]) -> None:
        records = recorder.take(event, commands, ways)
        for keep in keepers:
            keep(records)

    return heard
