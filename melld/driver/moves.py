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

from melld.driver.executor import Executor, Move
from melld.engine.fleet.fleet import Fleet
from melld.errors import MelldError
from melld.ids import RequestId, WorkerId
from melld.kvstore.ledger import Holding
from melld.migrate.boundaries import Boundaries, Segment
from melld.migrate.migration import MovePace
from melld.migrate.planner import Deferred, Planner, Start, Wanted
from melld.migrate.snapshot import Phase, Via
from melld.migrate.table import MoveState, Outcome
from melld.migrate.topology import segments_of_machines
from melld.scheduler import events

log = logging.getLogger("melld.driver")
BOTH = (Via.KV, Via.TOKENS)


class MoveCancelled(MelldError):
    """A deferred move was cancelled before it started."""

    status = 409
    code = "move_cancelled"

    def __init__(self, request: str, why: str) -> None:
        super().__init__(f"the move of {request} was cancelled before it started: {why}")


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
        self._chosen: dict[RequestId, Via] = {}  # by operators, for deferred moves
        self._planned: dict[RequestId, Via] = {}  # by the planner, for moves under way
        self._without_kv: set[RequestId] = set()
        self._waiters: dict[RequestId, list[asyncio.Future[Move]]] = {}
        self._assumed = planner.boundaries
        self._machines: Mapping[WorkerId, str] = {}
        self._networks: tuple[Segment, ...] = ()
        """Segments that the machines of these workers share."""

    # -- called by the driver ----------------------------------------------------------------------------------------

    def want(self, command: events.MoveRequest, asked: bool, via: Via | None, is_epoch: bool) -> None:
        """Accept a move from the scheduler: it starts at once, with the current epoch, or later.

        `asked`: an operator wants it, by way of `via` if that is given.
        """
        request, handed_over = command.request, command.after_first_token
        via = Via.KV if handed_over else via
        self._chosen.pop(request, None)
        if via is not None:
            self._chosen[request] = via
        kv_bytes, tokens, ways = self._size(request, command.source, command.destination)
        wanted = Wanted(
            request=request,
            source=command.source,
            destination=command.destination,
            kv_bytes=max(kv_bytes, command.kv_bytes) if handed_over else kv_bytes or command.kv_bytes,
            tokens=tokens,
            urgency_s=command.urgency_s,
            ways=ways,
            asked=asked,
            after_first_token=handed_over,
            cause=command.cause,
        )
        self.planner.ask(wanted, self._clock())
        if not is_epoch:
            self.planner.respect(self.boundaries())
            if (start := self.planner.at_once(request, self._batches())) is not None:
                self._start(start)

    def plan(self) -> None:
        """Plan an epoch's moves, once all of them have been requested."""
        for deferred in list(self.planner.waiting.values()):
            self._look_again(deferred.wanted)
        if not self.planner.is_idle:
            self.planner.respect(self.boundaries())
        plan = self.planner.epoch({} if self.planner.is_idle else self._batches())
        for start in plan.starts:
            self._start(start)
        for deferred in plan.given_up:
            self._cancel(deferred, f"waiting for {self._clock() - deferred.since_s:.0f} s: {deferred.cause}")

    def heard(self, event: events.AnyEvent) -> None:
        """Follow an event after the scheduler has heard of it and before its commands are carried out."""
        match event:
            case events.MoveCommitted() | events.MoveAborted():
                self.planner.ended(event.request)
                planned = self._planned.pop(event.request, None)
                if planned is Via.KV and isinstance(event, events.MoveCommitted) and event.via == Via.TOKENS:
                    self._without_kv.add(event.request)
            case events.RequestFinished():
                self.planner.ended(event.request)
                self._without_kv.discard(event.request)
                if (deferred := self.planner.drop(event.request)) is not None:
                    self._forget(deferred, "the request has finished")
            case events.WorkerDown():
                for worker in event.workers:
                    for deferred in self.planner.drop_worker(worker):
                        self._cancel(deferred, f"{worker} is gone")

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

    def why_deferred(self, request: RequestId) -> str:
        """Say why the request's move has not started; empty if it has, or if there is none."""
        move, deferred = self._executor.moves.get(request), self.planner.waiting.get(request)
        if deferred is not None:
            return deferred.cause.value if move is None else "its last move is still in progress"
        queued = move is not None and move.migration.state is MoveState.QUEUED
        return "other moves use the same link" if queued else ""

    def way_of(self, request: RequestId) -> Via | None:
        """Return the way of the request's move, or the planned way of a deferred one; None if there is no move."""
        if (deferred := self.planner.waiting.get(request)) is not None:
            return self.planner.first_way(deferred.wanted)
        move = self._executor.moves.get(request)
        return move.migration.via if move is not None else None

    async def begun(self, request: RequestId) -> Move:
        """Return the request's migration once it has started.

        Raises:
            MoveCancelled: the move was cancelled before.
            KeyError: there is no such move.
        """
        if request not in self.planner.waiting:
            return self._executor.moves[request]
        future: asyncio.Future[Move] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(request, []).append(future)
        return await future

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

    def _look_again(self, wanted: Wanted) -> None:
        """Refresh a move's size and ways; cancel it if the request has left the source."""
        live = self._fleet.live.get(wanted.request)
        if live is None or live.worker != wanted.source:
            if (deferred := self.planner.drop(wanted.request)) is not None:
                self._cancel(deferred, f"the request has left {wanted.source}")
            return
        kv_bytes, tokens, ways = self._size(wanted.request, wanted.source, wanted.destination)
        self.planner.resize(wanted.request, max(kv_bytes, wanted.kv_bytes), tokens, ways)

    def _size(self, request: RequestId, source: WorkerId, destination: WorkerId) -> tuple[int, int, tuple[Via, ...]]:
        """Return its bytes (0 before its worker's first report), tokens, and open ways."""
        live = self._fleet.live.get(request)
        holding: Holding | None = self._fleet.ledger.holding(request, source)
        kv_bytes = holding.kv_bytes if holding is not None else 0
        if live is None or live.worker != source:
            return kv_bytes, 1, ()
        tokens = live.prompt_tokens + len(live.output_token_ids)
        is_free = request not in self._executor.moves  # else its last move must be cleaned up first
        if not (is_free and self._fleet.is_ready(source) and self._fleet.is_ready(destination)):
            return kv_bytes, tokens, ()
        chosen = self._chosen.get(request)
        ways = BOTH if chosen is None else (chosen,)
        if chosen is None and (request in self._without_kv or not self._may_copy(request, source, destination)):
            ways = (Via.TOKENS,)
        return kv_bytes, tokens, ways

    def _may_copy(self, request: RequestId, source: WorkerId, destination: WorkerId) -> bool:
        """Return True if KV can be copied; between machines, only over a link of known speed."""
        if self._executor.check_link(request, destination, None):
            return False
        is_known = (link := self._executor.links.get((source, destination))) is not None and link.bytes_per_s > 0.0
        return is_known or self._fleet.are_near(source, destination)

    def _batches(self) -> dict[WorkerId, int]:
        """Return the number of decoding requests on each worker."""
        ledger = self._fleet.ledger
        return {
            worker: sum(holding.phase == Phase.DECODING for holding in ledger.holdings_on(worker))
            for worker in self._fleet.workers
        }

    # -- starting and cancelling -------------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        wanted = start.wanted
        # If both ways are open, a source whose KV cannot be copied sends the tokens instead.
        via = None if start.via is Via.KV and wanted.ways == BOTH else start.via
        try:
            move = self._executor.start(
                wanted.request,
                wanted.destination,
                via,
                self._paces(wanted),
                wanted.cause,
                after_first_token=wanted.after_first_token,
            )
        except Exception as error:  # the boundary of one move: the others start
            if not isinstance(error, MelldError):
                log.exception("failed: %s", start)
            if wanted.request not in self._executor.moves:  # else its deadline ends it
                self.planner.ended(wanted.request)
                self._cancel(Deferred(wanted, self._clock()), str(error))
            return
        self._planned[wanted.request] = start.via
        self._chosen.pop(wanted.request, None)
        for future in self._waiters.pop(wanted.request, ()):
            if not future.done():
                future.set_result(move)

    def _paces(self, wanted: Wanted) -> dict[Via, MovePace]:
        """Return a pace for each way on which the move takes more than one epoch."""
        epoch_s, paces = self.planner.boundaries.epoch_s, {}
        for via, cost in ((Via.KV, wanted.kv_bytes), (Via.TOKENS, wanted.tokens)):
            if cost > (per_epoch := self.planner.per_epoch(wanted, via)):
                paces[via] = MovePace(per_epoch / epoch_s, cost / per_epoch * epoch_s)
        return paces

    def _cancel(self, deferred: Deferred, why: str) -> None:
        """Cancel a deferred move and tell the scheduler, which counts the request on both workers until then."""
        wanted = deferred.wanted
        way = wanted.request, wanted.source, wanted.destination, wanted.cause
        log.info("move of %s (%s -> %s, event #%d) cancelled: %s", *way, why)
        self._forget(deferred, why)
        how = wanted.request, why, wanted.destination
        self._tell(events.MoveAborted(self._clock(), *how, cause=wanted.cause))

    def _forget(self, deferred: Deferred, why: str) -> None:
        request = deferred.wanted.request
        self._chosen.pop(request, None)
        for future in self._waiters.pop(request, ()):
            if not future.done():
                future.set_exception(MoveCancelled(request, why))
