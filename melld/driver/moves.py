"""Moves the scheduler wants, from command to start: the planner's shell.

Owns what the planner hears (present sizes, open ways, batches) and acts on its answer.  Decides nothing; the executor
owns the moves that have started.

    MoveRequest ──want──► Planner ──► Executor.start
         ▲                   └─ given up, or its worker or its way is gone ──► MoveAborted
    EpochStarted ──plan──►
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from melld.driver.executor import Executor
from melld.driver.report import MoveReport
from melld.engine.fleet.fleet import Fleet
from melld.errors import MelldError
from melld.ids import RequestId, WorkerId
from melld.migrate.boundaries import Boundaries, Segment
from melld.migrate.planner import Planner
from melld.migrate.snapshot import Phase, Via
from melld.migrate.table import MoveState, Outcome
from melld.migrate.topology import segments_of_machines
from melld.migrate.wish import BOTH, MovePace, Wish
from melld.scheduler import events

log = logging.getLogger("melld.driver")


class MoveCancelled(MelldError):
    """A deferred move was cancelled before it started."""

    status = 409
    code = "move_cancelled"

    def __init__(self, request: str, why: str) -> None:
        super().__init__(f"the move of {request} was cancelled before it started: {why}")


class Asked(NamedTuple):
    """An operator's order: how the request is to go, and the answer once the move is over."""

    via: Via | None
    after_first_token: bool
    answer: asyncio.Future[MoveReport]


class WantedMoves:
    """All moves that the scheduler has asked for and that have not started.  `tell` takes events for the driver."""

    def __init__(
        self,
        fleet: Fleet,
        executor: Executor,
        planner: Planner,
        clock: Callable[[], float],
        tell: Callable[[events.AnyEvent], None],
    ) -> None:
        self.planner = planner
        self._fleet = fleet
        self._executor = executor
        self._clock = clock
        self._tell = tell
        self.asked: dict[RequestId, Asked] = {}  # by operators, of moves that are decided now or wait
        self._without_kv: set[RequestId] = set()
        self._assumed = planner.boundaries
        self._machines: Mapping[WorkerId, str] = {}
        self._networks: tuple[Segment, ...] = ()
        """Segments that the machines of these workers share."""

    # -- called by the driver ----------------------------------------------------------------------------------------

    def want(self, command: events.MoveRequest, is_epoch: bool) -> None:
        """Accept a move from the scheduler: it starts at once, with the current epoch, or later."""
        request, asked = command.request, self.asked.get(command.request)
        after_first_token = command.after_first_token if asked is None else asked.after_first_token
        via = asked.via if asked is not None else None
        held_bytes = self._held_bytes(request, command.source)
        wish = Wish(
            request=request,
            source=command.source,
            destination=command.destination,
            # Of a prompt under way only what is computed is copied, unless the copy follows it to its end.
            kv_bytes=held_bytes if held_bytes and not after_first_token else command.kv_bytes,
            urgency_s=command.urgency_s,
            via=Via.KV if after_first_token else via,
            asked=asked is not None,
            after_first_token=after_first_token,
            reason=command.reason,
            cause=command.cause,
        )
        self._measure(wish)
        self.planner.ask(wish, self._clock())
        if not is_epoch:
            self.planner.respect(self.boundaries())
            if self.planner.at_once(request, self._batches()) is not None:
                self._start(wish)

    def plan(self) -> None:
        """Plan an epoch's moves, once all of them have been requested."""
        for wish in list(self.planner.waiting.values()):
            if not self._measure(wish) and self.planner.drop(wish.request) is not None:
                self._cancel(wish, f"the request has left {wish.source}")
        if not self.planner.is_idle:
            self.planner.respect(self.boundaries())
        plan = self.planner.epoch({} if self.planner.is_idle else self._batches())
        for wish in plan.starts:
            self._start(wish)
        for wish in plan.given_up:
            self._cancel(wish, f"waiting for {self._clock() - wish.since_s:.0f} s: {wish.waits_for}")

    def heard(self, event: events.AnyEvent) -> None:
        """Follow an event after the scheduler has heard of it and before its commands are carried out."""
        match event:
            case events.MoveCommitted() | events.MoveAborted():
                self.planner.ended(event.request)
                move = self._executor.moves.get(event.request)
                if isinstance(event, events.MoveCommitted) and move is not None and move.fell_back:
                    self._without_kv.add(event.request)
            case events.RequestFinished():
                self.planner.ended(event.request)
                self._without_kv.discard(event.request)
                if self.planner.drop(event.request) is not None:
                    self._answer(event.request, "the request has finished")
            case events.WorkerDown():
                for worker in event.workers:
                    for wish in self.planner.drop_worker(worker):
                        self._cancel(wish, f"{worker} is gone")

    def is_stale(self, event: events.AnyEvent) -> bool:
        """Return True if the event aborts a move that the scheduler has dropped: a newer one waits or has started.

        The scheduler drops a move when a worker goes down; the source may still have to be thawed after that.
        """
        if not isinstance(event, events.MoveAborted):
            return False
        move = self._executor.moves.get(event.request)
        has_begun = move is not None and move.migration.outcome in (None, Outcome.COMMITTED)
        return has_begun or event.request in self.planner.waiting

    # -- for status and operators ------------------------------------------------------------------------------------

    def unfinished(self) -> list[Wish]:
        """Return the moves that wait or are under way, in the order of their decisions."""
        begun = [move.wish for move in self._executor.moves.values() if move.migration.outcome is None]
        return sorted((*begun, *self.planner.waiting.values()), key=lambda wish: wish.since_s)

    def why_deferred(self, request: RequestId) -> str:
        """Say why the request's move has not started; empty if it has, or if there is none."""
        move, wish = self._executor.moves.get(request), self.planner.waiting.get(request)
        if wish is not None:
            return wish.waits_for.value if move is None else "its last move is still in progress"
        queued = move is not None and move.migration.state is MoveState.QUEUED
        return "other moves use the same link" if queued else ""

    def way_of(self, request: RequestId) -> Via | None:
        """Return the way of the request's move, or the planned way of a deferred one; None if there is no move."""
        if (wish := self.planner.waiting.get(request)) is not None:
            return self.planner.first_way(wish)
        move = self._executor.moves.get(request)
        return move.migration.via if move is not None else None

    def boundaries(self) -> Boundaries:
        """Return the last measured boundaries of links and workers."""
        rates = {ends: link.bytes_per_s for ends, link in self._executor.links.items() if link.bytes_per_s}
        workers = self._fleet.workers
        costs = {worker: known for worker, facts in workers.items() if (known := facts.times.costs) is not None}
        machines = {worker: self._fleet.places[worker].slot.machine for worker in workers}
        if machines != self._machines:
            self._machines, self._networks = machines, segments_of_machines(machines)
        return self._assumed.learned(rates, costs, self._networks)

    # -- facts for the planner ---------------------------------------------------------------------------------------

    def _measure(self, wish: Wish) -> bool:
        """Refresh a move's size and ways; return False if the request has left the source."""
        live = self._fleet.live.get(wish.request)
        wish.kv_bytes = max(wish.kv_bytes, self._held_bytes(wish.request, wish.source))
        wish.ways = ()
        if live is None or live.worker != wish.source:
            return False
        wish.tokens = live.prompt_tokens + len(live.output_token_ids)
        is_free = wish.request not in self._executor.moves  # else its last move must be cleaned up first
        if is_free and self._fleet.is_ready(wish.source) and self._fleet.is_ready(wish.destination):
            wish.ways = (wish.via,) if wish.via is not None else BOTH if self._may_copy(wish) else (Via.TOKENS,)
        return True

    def _held_bytes(self, request: RequestId, worker: WorkerId) -> int:
        """Return the bytes that the request holds there; 0 before its worker's first report."""
        holding = self._fleet.ledger.holding(request, worker)
        return holding.kv_bytes if holding is not None else 0

    def _may_copy(self, wish: Wish) -> bool:
        """Return True if KV can be copied; between machines, only over a link of known speed."""
        if wish.request in self._without_kv or self._executor.check_link(wish.request, wish.destination, None):
            return False
        is_known = (link := self._executor.links.get(wish.link)) is not None and link.bytes_per_s > 0.0
        return is_known or self._fleet.are_near(*wish.link)

    def _batches(self) -> dict[WorkerId, int]:
        """Return the number of decoding requests on each worker."""
        ledger = self._fleet.ledger
        return {
            worker: sum(holding.phase == Phase.DECODING for holding in ledger.holdings_on(worker))
            for worker in self._fleet.workers
        }

    # -- starting and cancelling -------------------------------------------------------------------------------------

    def _start(self, wish: Wish) -> None:
        if wish.planned is Via.TOKENS or wish.ways != BOTH:  # else a source whose KV cannot go sends the tokens instead
            wish.via = wish.planned
        wish.paces = self._paces(wish)
        asked = self.asked.get(wish.request)
        try:
            self._executor.start(wish, asked.answer if asked is not None else None)
        except Exception as error:  # the boundary of one move: the others start
            if not isinstance(error, MelldError):
                log.exception("failed: %s", wish)
            if wish.request not in self._executor.moves:  # else its deadline ends it, and the operator hears of that
                self.planner.ended(wish.request)
                self._cancel(wish, str(error))
                return
        self.asked.pop(wish.request, None)

    def _paces(self, wish: Wish) -> dict[Via, MovePace]:
        """Return a pace for each way on which the move takes more than one epoch."""
        epoch_s, paces = self.planner.boundaries.epoch_s, {}
        for via, cost in ((Via.KV, wish.kv_bytes), (Via.TOKENS, wish.tokens)):
            if cost > (per_epoch := self.planner.per_epoch(wish, via)):
                paces[via] = MovePace(per_epoch / epoch_s, cost / per_epoch * epoch_s)
        return paces

    def _cancel(self, wish: Wish, why: str) -> None:
        """Cancel a deferred move and tell the scheduler, which counts the request on both workers until then."""
        log.info("move of %s (%s -> %s, event #%d) cancelled: %s", wish.request, *wish.link, wish.cause, why)
        self._answer(wish.request, why)
        how = wish.request, why, wish.destination
        self._tell(events.MoveAborted(self._clock(), *how, cause=wish.cause))

    def _answer(self, request: RequestId, why: str) -> None:
        """Tell the operator, if one waits, that the move was cancelled."""
        if (asked := self.asked.pop(request, None)) is not None and not asked.answer.done():
            asked.answer.set_exception(MoveCancelled(request, why))
