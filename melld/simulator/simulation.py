"""The discrete-event loop: a workload, a model of the machines, and the daemon's scheduler in virtual time.

Owns virtual time and the order of events: by time, then by a sequence number.  Never decides where requests go: the
`Scheduler` class is the daemon's, and all that it knows comes through `handle`.

    arrivals ─┐                       ┌─► RequestsGrew, EpochStarted, ... ─► Scheduler.handle ────────┐
              ├─► next event ─► act ──┤                                                               │
    heap ─────┘   (finish, epoch,     └─► SimulatedFleet (memory, pace, links)  ◄── place, move, ... ◄┘
                   end of a move)

Each epoch, in this order: requests advance; workers that overflow preempt, as vLLM does; the scheduler gets the new
sizes; moves that no longer fit their destination are cancelled; the scheduler hears of that and of the epoch; the paces
of the next epoch are set.  With `paper_slots`, overflow is checked after the scheduler has acted, as in the paper's
time slots: an overflow that is cured within its slot does not count.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec

from melld.decisions.recorder import Recorder, decision
from melld.decisions.records import Record, fact_records
from melld.ids import NO_EVENT, EventId, RequestId
from melld.scheduler import events
from melld.scheduler.events import AnyEvent, RequestArrived, RequestFinished
from melld.scheduler.scheduler import Scheduler
from melld.simulator.fleet import Ending, SimulatedFleet
from melld.simulator.losses import lose_machine
from melld.simulator.measures import Measures
from melld.simulator.moves import Moves
from melld.simulator.run import Run, RunState, SimulationStuck
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload

RUNNING, ENDED = RunState.RUNNING, RunState.ENDED
STUCK_AFTER_S = 24 * 3600.0
Sink = Callable[[Record], object]


class Simulation:
    """A run of one policy on one workload.  Call `run` once."""

    def __init__(
        self, settings: SimulatorSettings, workload: Workload, scheduler: Scheduler, log: Sink | None = None
    ) -> None:
        self.settings = settings
        self.workload = workload.limited(settings.most_tokens)
        self.scheduler = scheduler
        self.fleet = SimulatedFleet(settings)
        self._runs = self.fleet.runs
        self.measures = Measures(settings, self.workload)
        self._moves = Moves(settings, self.fleet, self.measures, self)
        self._planning = self._moves.planning
        self.now_s = 0.0
        self._log, self._recorder = log, Recorder(scheduler)
        self._decide = scheduler.handle
        self._told = NO_EVENT
        self._tells_paces = settings.targets is not None
        self._unbounded = settings.gpus is None
        self._priority = (settings.tells_priorities and self.workload.priority) or [0] * len(self.workload)
        self._prompt_bytes = settings.kv_bytes_of(self.workload.prompt_tokens)
        self._heap: list[tuple[float, int, Callable[[Any, int], None], Any, int]] = []
        self._ending: list[Ending] = []  # in this epoch, the next one last
        self._sequence = itertools.count()
        self._epochs = 0
        self._next_epoch_s = 0.0
        self._last_progress_s = 0.0
        self._apply: dict[type, Callable[[Any], None]] = {
            events.PlaceRequest: self._place,
            events.QueueRequest: self._queue,
            events.RefuseRequest: self._refuse,
            events.ShedRequest: self._refuse,
            events.MoveRequest: self._moves.decided,
            events.SuspendRequest: self._suspend,
            events.PromiseRoom: lambda _: None,
            events.SetRole: lambda _: None,
            events.ActivateWorker: self._activate,
            events.RetireWorker: self._retire,
        }

    def run(self) -> Measures:
        """Simulate until every request has ended and every worker sleeps.

        Raises:
            SimulationStuck: requests wait and nothing will place them.
        """
        self._add_workers(self.fleet.missing_workers())
        if self.settings.machine_lost_at_s is not None:
            self.push(self.settings.machine_lost_at_s, self._lose_machine, None, 0)
        self._run(self.workload.arrival_s)
        self.measures.end(self.now_s)
        return self.measures

    def _run(self, arrivals: list[float]) -> None:
        """Process events in order: arrivals and this epoch's ends from their lists, all others from the heap."""
        heap, fleet, never = self._heap, self.fleet, math.inf
        arrived, count, arrivals = 0, len(arrivals), [*arrivals, never]
        arrival_s = arrivals[0]
        self._begin_epoch(None, 0)
        while True:
            ending = self._ending
            end_s = ending[-1][0] if ending else never
            while arrival_s <= end_s and arrival_s <= heap[0][0]:
                self.now_s = arrival_s
                self._arrive(arrived)
                arrived += 1
                arrival_s = arrivals[arrived]
                if arrived == count:
                    self.measures.last_arrival(self.now_s)
            if end_s <= heap[0][0]:
                self.now_s, run, version = ending.pop()
                self._finish(run, version)
            elif arrived == count and not fleet.runs and not fleet.awake:
                return
            else:
                self.now_s, _, act, subject, version = heapq.heappop(heap)
                act(subject, version)

    # ---- facts: what happens and is reported to the scheduler

    def _arrive(self, index: int) -> None:
        workload, request = self.workload, RequestId(f"r{index}")
        prompt_tokens, prompt_bytes = workload.prompt_tokens[index], self._prompt_bytes[index]
        turn = self._priority[index] >= 0, self.fleet.turns.due_s(prompt_tokens, self.now_s)
        self._runs[request] = Run(request, index, prompt_tokens, workload.output_tokens[index], prompt_bytes, turn)
        self.handle(RequestArrived(self.now_s, request, prompt_bytes, prompt_tokens, self._priority[index]))

    def _finish(self, run: Run, version: int) -> None:
        if run.version != version:
            return
        run.become(ENDED)
        now_s = self._last_progress_s = self.now_s
        self.measures.finished(run, now_s)
        self.fleet.drop(run)
        self._moves.forget(run.id)
        self.handle(RequestFinished(now_s, run.id, run.output, run.first_token_s))

    def _begin_epoch(self, _subject: None, _version: int) -> None:
        now_s, fleet = self.now_s, self.fleet
        paper_slots = self.settings.paper_slots
        fleet.memory.advance(now_s)
        if not paper_slots:
            self._preempt()
        grown = fleet.resume(now_s)
        grown.update(fleet.memory.take_growth())
        if grown:
            self.handle(events.RequestsGrew(now_s, grown))
        if not paper_slots:
            self._moves.turn_back()
        if self._tells_paces and (paces := fleet.take_paces(now_s)):
            self.handle(events.WorkersPaced(now_s, paces))
        self.handle(events.EpochStarted(now_s))
        if paper_slots:
            fleet.memory.settle_sizes()
            self._preempt()
            self._moves.turn_back()
        self._epochs += 1
        self._next_epoch_s = self._epochs * self.settings.epoch_s
        self._ending = fleet.replan(now_s, self._next_epoch_s - now_s)
        self.push(self._next_epoch_s, self._begin_epoch, None, 0)
        self.measures.sample(now_s, fleet)
        if fleet.awake:
            self._last_progress_s = now_s
        elif fleet.runs and now_s - self._last_progress_s > STUCK_AFTER_S:
            raise SimulationStuck(len(fleet.runs), now_s)

    def _tell_wake_time(self, _subject: None, index: int) -> None:
        """Report the worker's wake time: zero once it computes, the full wake time while it sleeps."""
        worker = self.fleet.names[index]
        if self.fleet.computes(worker, self.now_s):
            self.handle(events.WorkerWakeTimeChanged(self.now_s, worker, 0.0))
        elif index not in self.fleet.awake:
            self.handle(events.WorkerWakeTimeChanged(self.now_s, worker, self.settings.wake_s))

    def _preempt(self) -> None:
        for run in self.fleet.memory.overflowing():
            run.become(RunState.PREEMPTED)
            self.measures.counts.preemptions += 1
            self.handle(events.RequestPreempted(self.now_s, run.id))

    def _lose_machine(self, _subject: None, machine: int) -> None:
        workers, displaced, unmoved = lose_machine(self.fleet, machine, self.now_s)
        for run in unmoved:
            self._moves.forget(run.id)
        self.measures.lost(self.now_s, displaced, len(self.fleet.awake))
        self.handle(events.WorkerDown(self.now_s, workers[0], tuple(workers[1:])))

    # ---- decisions: what the scheduler wants

    def handle(self, event: AnyEvent) -> None:
        """Let the scheduler decide on an event, and carry its decisions out."""
        self._handle(event)
        if self._unbounded and (missing := self.fleet.missing_workers()):
            self._add_workers(missing)

    def _handle(self, event: AnyEvent) -> None:
        self._told = EventId(self._told + 1)
        event = msgspec.structs.replace(event, id=self._told)
        commands = self._decide(event)
        if self._log is not None:
            for fact in self._recorder.facts(event):
                self._log(fact)
        if self._planning is not None:
            self._planning.consider(event, commands)
        for command in commands:
            if self._log is not None:
                moves = [command] if isinstance(command, events.MoveRequest) else []
                self._log(decision(event, command, {move.request: self._moves.way_of(move) for move in moves}))
            self._apply[type(command)](command)
        self._moves.begin_planned()

    def record(self, event: AnyEvent) -> None:
        """Log a fact that the scheduler does not hear of, if a log is kept."""
        if self._log is not None:
            for fact in fact_records(event):
                self._log(fact)

    def _place(self, command: events.PlaceRequest) -> None:
        run = self._runs[command.request]
        now_s = self.now_s
        if run.row >= 0:
            self.fleet.resume_suspended(run, command.worker, now_s)
            self.measures.resumed(run, self.fleet.running.since_s[run.row])
            self.expect_end(run)
            return
        run.become(RUNNING)
        run.placed_s = now_s
        end_s = self.fleet.place(run, command.worker, now_s)
        if delayed := self.fleet.overtake(run, now_s):
            for one in (run, *delayed):
                self.expect_end(one)
            return
        if end_s <= self._next_epoch_s:  # no later replan would notice it
            heapq.heappush(self._heap, (end_s, next(self._sequence), self._finish, run, run.version))

    def _suspend(self, command: events.SuspendRequest) -> None:
        self.fleet.suspend(self._runs[command.request], self.now_s)

    def _queue(self, _command: events.QueueRequest) -> None:
        self.measures.counts.queued += 1

    def _refuse(self, command: events.RefuseRequest | events.ShedRequest) -> None:
        self.fleet.runs.pop(command.request).become(RunState.ENDED)
        self.measures.counts.refused += 1

    def _activate(self, command: events.ActivateWorker) -> None:
        self.fleet.wake(command.worker, self.now_s)
        self.measures.activated(self.now_s, len(self.fleet.awake))
        if self.settings.wake_s:
            at_s = self.now_s + self.settings.wake_s
            self.push(at_s, self._tell_wake_time, None, self.fleet.indexes[command.worker])

    def _retire(self, command: events.RetireWorker) -> None:
        self.fleet.sleep(command.worker)
        self.measures.count_gpus(self.now_s, len(self.fleet.awake))
        if self.settings.wake_s:
            self.push(self.now_s, self._tell_wake_time, None, self.fleet.indexes[command.worker])

    # ---- small things

    def _add_workers(self, count: int) -> None:
        settings = self.settings
        offered = settings.capacity_bytes, settings.slots
        for worker, machine in self.fleet.add_workers(count):
            self._handle(events.WorkerUp(self.now_s, worker, *offered, machine, settings.block_bytes))
            if settings.wake_s:
                self._handle(events.WorkerWakeTimeChanged(self.now_s, worker, settings.wake_s))

    def expect_end(self, run: Run) -> None:
        """Let the run end in this epoch if it does: no later replan would notice it."""
        if (end_s := self.fleet.end_s(run)) <= self._next_epoch_s:
            self.push(end_s, self._finish, run, run.version)

    def push(self, at_s: float, act: Callable[[Any, int], None], subject: Run | None, version: int) -> None:
        """Call `act` with the subject and its version at that time, or now if that is past."""
        heapq.heappush(self._heap, (max(at_s, self.now_s), next(self._sequence), act, subject, version))
