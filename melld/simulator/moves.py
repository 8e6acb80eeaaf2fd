"""The moves of a simulation, from the scheduler's command to the commit.

Decides nothing: the scheduler says what moves, and the planner, if there are links, when and by which way.

    decided ──► planner, or at once ──► copied or computed ──► committed, or aborted: no room, a fault, preempted
            └─► after the first token: followed ──► handed over ──┘
"""

import random
from typing import TYPE_CHECKING

from melld.ids import RequestId
from melld.migrate.snapshot import Via
from melld.scheduler import events
from melld.simulator.planning import MovePlanning
from melld.simulator.run import Run, RunState, SimulatedMove

if TYPE_CHECKING:
    from melld.simulator.simulation import Simulation


class Moves:
    """The moves of one simulation.  `planning`: None if moves take no time."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._settings, self._fleet, self._measures = simulation.settings, simulation.fleet, simulation.measures
        link = self._settings.link
        self.planning = None if link is None else MovePlanning(self._settings, link, self._fleet)
        self._chance = random.Random(self._settings.seed)

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
        self._simulation.handle(events.MoveCommitted(self._simulation.now_s, run.id, via=via, cause=cause))

    def _abort(self, run: Run, reason: str) -> None:
        assert run.move is not None
        cause = run.move.cause
        self._fleet.abort(run)
        self._measures.aborted += 1
        self.forget(run.id)
        self._simulation.handle(events.MoveAborted(self._simulation.now_s, run.id, reason=reason, cause=cause))

    def _commit(self, run: Run) -> None:
        assert run.move is not None
        machine_of = self._fleet.machine_of
        is_far = machine_of(run.worker) != machine_of(run.move.destination)
        self._measures.moved(run.move.via, self._fleet.kv_bytes(run), is_far)
        self.forget(run.id)
        self._fleet.commit(run, self._simulation.now_s)
        self._simulation.expect_end(run)

    def decided(self, command: events.MoveRequest) -> None:
        """Announce the move; begin it unless it is planned or waits for the first token."""
        run = self._fleet.runs[command.request]
        if command.after_first_token:
            self._follow(run, self._fleet.expect(run, command.destination, Via.KV, command.cause))
            return
        via = Via.KV if self.planning is None else self.planning.way_of(command.request)
        move = self._fleet.expect(run, command.destination, via, command.cause)
        if self.planning is None:
            self._begin_move(run, move, self._simulation.now_s)

    def begin_planned(self) -> None:
        """Begin the moves that the planner has released; abort those that it gave up."""
        if self.planning is None:
            return
        plan, now_s = self.planning.take(), self._simulation.now_s
        for start in plan.starts:
            run = self._fleet.runs[start.wanted.request]
            assert run.move is not None
            run.move.via = start.via
            end_s = self._fleet.transfer(run, start.wanted.destination, start.via, start.per_epoch, now_s)
            self._begin_move(run, run.move, end_s)
        for deferred in plan.given_up:
            self._abort(self._fleet.runs[deferred.wanted.request], "deferred too long")

    def _begin_move(self, run: Run, move: SimulatedMove, end_s: float) -> None:
        simulation, rate = self._simulation, self._settings.failure_rate
        move.fails = rate > 0 and self._chance.random() < rate
        if move.fails:
            end_s = simulation.now_s + self._chance.random() * (end_s - simulation.now_s)
        if self._settings.instant_moves:  # the scheduler has counted the move as done: do not report it again
            self._commit(run)
            if simulation.journal is not None:
                committed = events.MoveCommitted(simulation.now_s, run.id, id=simulation.told, cause=move.cause)
                simulation.journal.fact(committed)
        else:
            simulation.push(end_s, self._end_move, run, move.version)

    def _follow(self, run: Run, move: SimulatedMove) -> None:
        self._fleet.follow(run, self._simulation.now_s)
        self._simulation.push(run.first_token_s, self._hand_over, run, move.version)

    def _hand_over(self, run: Run, version: int) -> None:
        """Copy what the first token's step has computed, unless the prompt is late or the request was preempted."""
        if run.move is None or run.move.version != version:
            return
        if run.state is not RunState.RUNNING:
            self._abort(run, "preempted")
        elif run.first_token_s > self._simulation.now_s:
            self._simulation.push(run.first_token_s, self._hand_over, run, version)
        else:
            self._begin_move(run, run.move, self._fleet.hand_over(run, self._simulation.now_s))
