"""The discrete-event loop: a workload, a model of the machines, and the daemon's own scheduler under virtual time.

Owns virtual time and the order of events: by time, then by a sequence number.  Never decides who goes where: the
`Scheduler` object is the daemon's, and everything that it learns, it learns from `handle`.

    arrivals ─┐                       ┌─► RequestsGrew, EpochStarted, ... ─► Scheduler.handle ─┐
              ├─► next event ─► act ──┤                                                        │
    heap ─────┘   (finish, epoch,     └─► Fleet (memory, pace, links)  ◄── place, move, ... ◄──┘
                   end of a move)

Each epoch, in this order: requests advance; workers that overflow preempt, as vLLM does; the scheduler is told the
new sizes and that the epoch began; paces are set for the next one.  With `paper_slots` overflow is judged after the
scheduler has acted, as in the paper's time slots: what it cures in the same slot has not happened.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from melld import events
from melld.decision_log import Record, decision_record, fact_records, preempted_record
from melld.errors import MelldError
from melld.events import AnyCommand, AnyEvent
from melld.scheduler.scheduler import Scheduler
from melld.simulator.fleet import Fleet
from melld.simulator.links import Via
from melld.simulator.measures import Measures
from melld.simulator.run import Run, RunState
from melld.simulator.settings import SimulatorSettings
from melld.simulator.workload import Workload

STUCK_AFTER_S = 24 * 3600.0
Sink = Callable[[Record], None]


class SimulationStuck(MelldError):
    """Requests wait although nothing runs, and nothing will change that."""

    def __init__(self, waiting: int, at_s: float) -> None:
        super().__init__(f"{waiting} requests wait at {at_s:.0f} s while nothing runs: the policy never places them")
        self.waiting = waiting
        self.at_s = at_s


class Simulation:
    """One policy on one workload.  `run` may be called once."""

    def __init__(
        self, settings: SimulatorSettings, workload: Workload, scheduler: Scheduler, log: Sink | None = None
    ) -> None:
        self.settings = settings
        self.workload = workload.limited(settings.most_tokens)
        self.scheduler = scheduler
        self.fleet = Fleet(settings)
        self.measures = Measures(settings, len(workload))
        self.now_s = 0.0
        self._log = log
        self._step = 0
        self._chance = random.Random(settings.seed)
        self._heap: list[tuple[float, int, Callable[[Any, int], None], Any, int]] = []
        self._sequence = itertools.count()
        self._epochs = 0
        self._next_epoch_s = 0.0
        self._last_progress_s = 0.0
        self._apply: dict[type, Callable[[Any], None]] = {
            events.PlaceRequest: self._place,
            events.QueueRequest: self._queue,
            events.RefuseRequest: self._refuse,
            events.MoveRequest: self._move,
            events.ActivateWorker: self._activate,
            events.RetireWorker: self._retire,
        }

    def run(self, progress: Callable[[int], None] | None = None) -> Measures:
        """Simulate until every request has ended and every worker sleeps.  `progress` hears of every arrival.

        Raises:
            SimulationStuck: requests wait for ever.
        """
        self._add_workers(self.fleet.missing_workers())
        arrivals, heap = self.workload.arrival_s, self._heap
        arrived, count = 0, len(arrivals)
        self._begin_epoch(None, 0)
        while True:
            if arrived < count and arrivals[arrived] <= heap[0][0]:
                self.now_s = arrivals[arrived]
                self._arrive(arrived)
                arrived += 1
                if arrived == count:
                    self.measures.last_arrival(self.now_s)
                if progress is not None:
                    progress(arrived)
                continue
            if arrived == count and not self.fleet.runs and not self.fleet.awake:
                break
            self.now_s, _, act, subject, version = heapq.heappop(heap)
            act(subject, version)
        self.measures.end(self.now_s)
        return self.measures

    # ---- facts: what happens, and is told

    def _arrive(self, index: int) -> None:
        prompt_tokens = self.workload.prompt_tokens[index]
        run = Run(index, prompt_tokens, self.workload.output_tokens[index], self.settings.kv_bytes(prompt_tokens))
        self.fleet.runs[run.id] = run
        self._handle(events.RequestArrived(self.now_s, run.id, run.kv_bytes, prompt_tokens))

    def _finish(self, run: Run, version: int) -> None:
        if run.version != version:
            return
        run.become(RunState.ENDED)
        self.measures.finished(run, run.first_token_s, self.now_s)
        self.fleet.drop(run)
        self._last_progress_s = self.now_s
        self._handle(events.RequestFinished(self.now_s, run.id))

    def _begin_epoch(self, _subject: None, _version: int) -> None:
        now_s, fleet = self.now_s, self.fleet
        paper_slots = self.settings.paper_slots
        fleet.advance(now_s)
        if not paper_slots:
            self._preempt()
        grown = fleet.resume(now_s)
        grown.update(fleet.take_growth())
        if grown:
            self._handle(events.RequestsGrew(now_s, grown))
        self._handle(events.EpochStarted(now_s))
        if paper_slots:
            self._preempt()
        self._epochs += 1
        self._next_epoch_s = self._epochs * self.settings.epoch_s
        for run, end_s in fleet.replan(now_s, self._next_epoch_s - now_s):
            self._push(end_s, self._finish, run, run.version)
        self._push(self._next_epoch_s, self._begin_epoch, None, 0)
        self.measures.sample(now_s, fleet)
        if fleet.awake:
            self._last_progress_s = now_s
        elif fleet.runs and now_s - self._last_progress_s > STUCK_AFTER_S:
            raise SimulationStuck(len(fleet.runs), now_s)

    def _preempt(self) -> None:
        for run in self.fleet.overflowing():
            run.become(RunState.PREEMPTED)
            self.measures.preemptions += 1
            self._handle(events.RequestPreempted(self.now_s, run.id))

    def _end_move(self, run: Run, version: int) -> None:
        if run.move is None or run.move.version != version:
            return
        if run.move.fails:
            self.fleet.abort(run)
            self.measures.aborted += 1
            self._handle(events.MoveAborted(self.now_s, run.id, reason="injected fault"))
            return
        self._commit(run)
        self._handle(events.MoveCommitted(self.now_s, run.id))

    def _commit(self, run: Run) -> None:
        assert run.move is not None
        self.measures.moved(run.move.via, run.kv_bytes)
        self.fleet.commit(run, self.now_s)
        self._expect_end(run)

    # ---- decisions: what the scheduler wants

    def _handle(self, event: AnyEvent) -> None:
        self._step += 1
        if self._log is not None:
            self._log_fact(event)
        for command in self.scheduler.handle(event):
            self._apply[type(command)](command)
        if self.settings.gpus is None and (missing := self.fleet.missing_workers()):
            self._add_workers(missing)

    def _place(self, command: events.PlaceRequest) -> None:
        run = self.fleet.runs[command.request]
        run.become(RunState.RUNNING)
        self._log_decision(command, run.kv_bytes)
        self.fleet.place(run, command.worker, self.now_s)
        self.measures.placed(run, self.now_s)
        self._expect_end(run)

    def _queue(self, command: events.QueueRequest) -> None:
        self._log_decision(command)
        self.measures.queued += 1

    def _refuse(self, command: events.RefuseRequest) -> None:
        self._log_decision(command)
        self.fleet.runs.pop(command.request).become(RunState.ENDED)
        self.measures.refused += 1

    def _move(self, command: events.MoveRequest) -> None:
        run = self.fleet.runs[command.request]
        if self.settings.link is None:
            via, end_s = Via.KV, self.now_s
        else:
            via, end_s = self.fleet.transfer(run, command.destination, self.now_s)
        fails = self.settings.failure_rate > 0 and self._chance.random() < self.settings.failure_rate
        if fails:
            end_s = self.now_s + self._chance.random() * (end_s - self.now_s)
        self._log_decision(command, via=via)
        move = self.fleet.start_move(run, command.destination, via, fails)
        if self.settings.instant_moves:  # the scheduler has counted it as done: it must not hear of it again
            self._commit(run)
            self._log_fact(events.MoveCommitted(self.now_s, run.id))
        else:
            self._push(end_s, self._end_move, run, move.version)

    def _activate(self, command: events.ActivateWorker) -> None:
        self._log_decision(command)
        self.fleet.wake(command.worker, self.now_s)
        self.measures.activated(self.now_s, len(self.fleet.awake))

    def _retire(self, command: events.RetireWorker) -> None:
        self._log_decision(command)
        self.fleet.sleep(command.worker)
        self.measures.retired(self.now_s, len(self.fleet.awake))

    # ---- small things

    def _add_workers(self, count: int) -> None:
        for worker, machine in self.fleet.add_workers(count):
            capacity_bytes, slots = self.settings.capacity_bytes, self.settings.slots
            self._handle_up(events.WorkerUp(self.now_s, worker, capacity_bytes, slots, machine))

    def _handle_up(self, event: events.WorkerUp) -> None:
        self._step += 1
        self._log_fact(event)
        for command in self.scheduler.handle(event):
            self._apply[type(command)](command)

    def _expect_end(self, run: Run) -> None:
        """If the run ends before the next epoch, nobody else will notice it."""
        end_s = self.fleet.end_s(run)
        if end_s <= self._next_epoch_s:
            self._push(end_s, self._finish, run, run.version)

    def _push(self, at_s: float, act: Callable[[Any, int], None], subject: Run | None, version: int) -> None:
        heapq.heappush(self._heap, (max(at_s, self.now_s), next(self._sequence), act, subject, version))

    def _log_fact(self, event: AnyEvent) -> None:
        if self._log is None:
            return
        if isinstance(event, events.RequestPreempted):
            worker = self.fleet.names[self.fleet.runs[event.request].worker]
            self._log(preempted_record(event, worker, self._step))
            return
        for record in fact_records(event, self._step):
            self._log(record)

    def _log_decision(self, command: AnyCommand, kv_bytes: int = 0, via: str = "kv") -> None:
        if self._log is not None:
            self._log(decision_record(self.now_s, command, kv_bytes, via, self._step))
