"""The moves of a simulation, from the scheduler's command to the commit.

Decides nothing: the scheduler says what moves, and the planner, if there are links, when and by which way.

    decided ──► planner, or at once ──► copied or computed ──► committed, or aborted: no room, a fault, preempted
            └─► after the first token: followed ──► handed over ──┘
"""

import random
from collections.abc import Callable
from typing import Any, Protocol

from melld.ids import RequestId
from melld.migrate.snapshot import Via
from melld.scheduler import events
from melld.scheduler.events import AnyEvent
from melld.simulator.fleet import SimulatedFleet
from melld.simulator.measures import Measures
from melld.simulator.planning import MovePlanning
from melld.simulator.run import Run, RunState, SimulatedMove
from melld.simulator.settings import SimulatorSettings


class Loop(Protocol):
    """Interface to the simulation that moves are part of."""

    now_s: float

    def handle(self, event: AnyEvent) -> None:
        """Let the scheduler decide on an event."""

    def record(self, event: AnyEvent) -> None:
        """Log a fact of the event being handled."""

    def expect_end(self, run: Run) -> None:
        """Let the run end in this epoch if it does."""

    def push(self, at_s: float, act: Callable[[Any, int], None], subject: Run | None, version: int) -> None:
        """Call `act` with the subject and its version at that time."""


class Moves:
    """The moves of one simulation.  `planning`: None if moves take no time."""

    def __init__(self, settings: SimulatorSettings, fleet: SimulatedFleet, measures: Measures, loop: Loop) -> None:
        self._settings, self._fleet, self._measures, self._loop = settings, fleet, measures, loop
        self.planning = None if settings.link is None else MovePlanning(settings, settings.link, fleet)
        self._chance = random.Random(settings.seed)

    def forget(self, request: RequestId) -> None:
        """Drop a request that has ended or whose move has."""
        if self.planning is not None:
            self.planning.forget(request)

    def turn_back(self) -> None:
        """Cancel moves that no longer fit, after the sizes are reported: else the scheduler overrates the free room."""
        for run in self._fleet.memory.crowding():
            self._abort(run, "no room")

    def _end_move(self, run: Run, version: int) -> None:
        if run.move is None or run.move.version != version:
            return
        if run.move.fails:
            self._abort(run, "injected fault")
            return
        via, cause = run.move.via, run.move.cause
        self._commit(run)
        self._loop.handle(events.MoveCommitted(self._loop.now_s, run.id, via=via, cause=cause))

    def _abort(self, run: Run, reason: str) -> None:
        assert run.move is not None
        cause = run.move.cause
        self._fleet.abort(run)
        self._measures.counts.migrations_aborted += 1
        self.forget(run.id)
        self._loop.handle(events.MoveAborted(self._loop.now_s, run.id, reason=reason, cause=cause))

    def _commit(self, run: Run) -> None:
        assert run.move is not None
        machine_of = self._fleet.machine_of
        is_far = machine_of(run.worker) != machine_of(run.move.destination)
        self._measures.moved(run.move.via, self._fleet.kv_bytes(run), is_far)
        self.forget(run.id)
        self._fleet.commit(run, self._loop.now_s)
        self._loop.expect_end(run)

    def way_of(self, command: events.MoveRequest) -> Via:
        """Return the way that the move takes or waits for."""
        if self.planning is None or command.after_first_token:
            return Via.KV
        return self.planning.way_of(command.request)

    def decided(self, command: events.MoveRequest) -> None:
        """Announce the move; begin it unless it is planned or waits for the first token."""
        run, now_s = self._fleet.runs[command.request], self._loop.now_s
        move = self._fleet.expect(run, command.destination, self.way_of(command), command.cause)
        if command.after_first_token:
            self._fleet.follow(run, now_s)
            self._loop.push(run.first_token_s, self._hand_over, run, move.version)
        elif self.planning is None:
            self._begin_move(run, move, now_s)

    def begin_planned(self) -> None:
        """Begin the moves that the planner has released; abort those that it gave up."""
        if self.planning is None:
            return
        plan, now_s = self.planning.take(), self._loop.now_s
        for wish in plan.starts:
            run, via = self._fleet.runs[wish.request], wish.planned
            assert run.move is not None
            assert via is not None
            run.move.via = via
            per_epoch = self.planning.planner.per_epoch(wish, via)
            self._begin_move(run, run.move, self._fleet.transfer(run, wish.destination, via, per_epoch, now_s))
        for wish in plan.given_up:
            self._abort(self._fleet.runs[wish.request], "deferred too long")

    def _begin_move(self, run: Run, move: SimulatedMove, end_s: float) -> None:
        now_s, rate = self._loop.now_s, self._settings.failure_rate
        move.fails = rate > 0 and self._chance.random() < rate
        if move.fails:
            end_s = now_s + self._chance.random() * (end_s - now_s)
        if self._settings.instant_moves:  # the scheduler has counted the move as done: do not report it again
            self._commit(run)
            self._loop.record(events.MoveCommitted(now_s, run.id, id=move.cause, cause=move.cause))
        else:
            self._loop.push(end_s, self._end_move, run, move.version)

    def _hand_over(self, run: Run, version: int) -> None:
        """Copy what the first token's step has computed, unless the prompt is late or the request was preempted."""
        if run.move is None or run.move.version != version:
            return
        if run.state is not RunState.RUNNING:
            self._abort(run, "preempted")
        elif run.first_token_s > self._loop.now_s:
            self._loop.push(run.first_token_s, self._hand_over, run, version)
        else:
            self._begin_move(run, run.move, self._fleet.hand_over(run, self._loop.now_s))
