"""The moves that the scheduler wants, from its command to their beginning: the planner at work on the fleet.

Owns what the planner is told (present sizes, open ways, batches) and what becomes of its word.  Decides nothing itself;
what has begun is the executor's.

    MoveRequest ──want──► Planner ──► Executor.start
         ▲                   └─ given up, or its worker or its way has gone ──► MoveAborted
    EpochStarted ──plan──►
"""

import asyncio
import logging
from collections.abc import Callable

from melld.driver.executor import Executor, Move
from melld.engine.fleet.fleet import Fleet
from melld.errors import MelldError
from melld.ids import RequestId, WorkerId
from melld.kvstore.ledger_page import Holding
from melld.migrate.migration import MovePace
from melld.migrate.planner import Deferred, Planner, Start, Wanted
from melld.migrate.snapshot import Phase, Via
from melld.migrate.table import MoveState, Outcome
from melld.scheduler import events

log = logging.getLogger("melld.driver")
BOTH = (Via.KV, Via.TOKENS)


class MoveCalledOff(MelldError):
    """It waited for its turn, and was called off before that came."""

    status = 409
    code = "move_called_off"

    def __init__(self, request: str, why: str) -> None:
        super().__init__(f"the move of {request} was called off before it began: {why}")


class WantedMoves:
    """All moves that the scheduler has asked for and that have not begun.  `tell` takes the driver's events."""

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
        self._chosen: dict[RequestId, Via] = {}  # by operators, for moves that wait
        self._planned: dict[RequestId, Via] = {}  # of moves under way that had the choice
        self._without_kv: set[RequestId] = set()
        self._waiters: dict[RequestId, list[asyncio.Future[Move]]] = {}

    # -- what comes in -----------------------------------------------------------------------------------------------

    def want(self, command: events.MoveRequest, asked: bool, via: Via | None, is_epoch: bool) -> None:
        """The scheduler has decided on a move: it begins at once, at the epoch that begins now, or later.

        `asked`: an operator wants it, by way of `via` if that is given.
        """
        request = command.request
        self._chosen.pop(request, None)
        if via is not None:
            self._chosen[request] = via
        kv_bytes, tokens, ways = self._size(request, command.source, command.destination)
        wanted = Wanted(
            request=request,
            source=command.source,
            destination=command.destination,
            kv_bytes=kv_bytes or command.kv_bytes,
            tokens=tokens,
            urgency_s=command.urgency_s,
            ways=ways,
            asked=asked,
            cause=command.cause,
        )
        self.planner.ask(wanted, self._clock())
        if not is_epoch and (start := self.planner.at_once(request, self._batches())) is not None:
            self._start(start)

    def plan(self) -> None:
        """An epoch has begun, and all that it asked for is known."""
        for deferred in list(self.planner.waiting.values()):
            self._look_again(deferred.wanted)
        plan = self.planner.epoch({} if self.planner.is_idle else self._batches())
        for start in plan.starts:
            self._start(start)
        for deferred in plan.given_up:
            self._call_off(deferred, f"it has waited for {self._clock() - deferred.since_s:.0f} s: {deferred.cause}")

    def heard(self, event: events.AnyEvent) -> None:
        """What happened, once the scheduler has heard of it and before its answer is obeyed."""
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
                    self._forget(deferred, "it has ended")
            case events.WorkerDown():
                for deferred in self.planner.drop_worker(event.worker):
                    self._call_off(deferred, f"{event.worker} has gone")

    def is_stale(self, event: events.AnyEvent) -> bool:
        """Whether the move that is off is one that the scheduler counts no more: a newer one waits, or has begun.

        The scheduler drops a move when it hears that a worker is down; the source may have to be thawed after that.
        """
        if not isinstance(event, events.MoveAborted):
            return False
        move = self._executor.moves.get(event.request)
        has_begun = move is not None and move.migration.outcome in (None, Outcome.COMMITTED)
        return has_begun or event.request in self.planner.waiting

    # -- what can be seen --------------------------------------------------------------------------------------------

    @property
    def deferred(self) -> list[Deferred]:
        """Those that wait, and why."""
        return list(self.planner.waiting.values())

    def why_deferred(self, request: RequestId) -> str:
        """Why the request's move has not begun; empty if it has, or if there is none."""
        move, deferred = self._executor.moves.get(request), self.planner.waiting.get(request)
        if deferred is not None:
            return deferred.cause.value if move is None else "its last move is not over yet"
        queued = move is not None and move.migration.state is MoveState.QUEUED
        return "others go over the same link" if queued else ""

    def way_of(self, request: RequestId) -> Via | None:
        """The way that its move goes, or will go if nothing stands in its way; None if there is no move."""
        if (deferred := self.planner.waiting.get(request)) is not None:
            return self.planner.first_way(deferred.wanted)
        move = self._executor.moves.get(request)
        return move.migration.via if move is not None else None

    async def begun(self, request: RequestId) -> Move:
        """The migration, once it has begun.

        Raises:
            MoveCalledOff: it never will.
            KeyError: there is no such move.
        """
        if request not in self.planner.waiting:
            return self._executor.moves[request]
        future: asyncio.Future[Move] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(request, []).append(future)
        return await future

    # -- what the planner is told ------------------------------------------------------------------------------------

    def _look_again(self, wanted: Wanted) -> None:
        """Its present size and ways; one whose request is somewhere else by now is off."""
        live = self._fleet.live.get(wanted.request)
        if live is None or live.worker != wanted.source:
            if (deferred := self.planner.drop(wanted.request)) is not None:
                self._call_off(deferred, f"it is not on {wanted.source} any more")
            return
        kv_bytes, tokens, ways = self._size(wanted.request, wanted.source, wanted.destination)
        self.planner.resize(wanted.request, max(kv_bytes, wanted.kv_bytes), tokens, ways)

    def _size(self, request: RequestId, source: WorkerId, destination: WorkerId) -> tuple[int, int, tuple[Via, ...]]:
        """Bytes (0 where its worker has said nothing of it yet), tokens, and the ways that are open now."""
        live = self._fleet.live.get(request)
        holding: Holding | None = self._fleet.ledger.holding(request, source)
        kv_bytes = holding.kv_bytes if holding is not None else 0
        if live is None or live.worker != source:
            return kv_bytes, 1, ()
        tokens = live.prompt_tokens + len(live.output_token_ids)
        is_free = request not in self._executor.moves  # else its last move has yet to be put in order
        if not (is_free and self._fleet.is_ready(source) and self._fleet.is_ready(destination)):
            return kv_bytes, tokens, ()
        chosen = self._chosen.get(request)
        ways = BOTH if chosen is None else (chosen,)
        if chosen is None and (request in self._without_kv or self._executor.check_link(request, destination, None)):
            ways = (Via.TOKENS,)
        return kv_bytes, tokens, ways

    def _batches(self) -> dict[WorkerId, int]:
        """Requests that decode on each worker."""
        ledger = self._fleet.ledger
        return {
            worker: sum(holding.phase == Phase.DECODING for holding in ledger.holdings_on(worker))
            for worker in self._fleet.workers
        }

    # -- what becomes of them ----------------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        wanted = start.wanted
        # A source that finds that its KV cannot go sends the tokens, where both ways are open.
        via = None if start.via is Via.KV and wanted.ways == BOTH else start.via
        try:
            move = self._executor.start(wanted.request, wanted.destination, via, self._paces(wanted), wanted.cause)
        except Exception as error:  # the boundary of one move: the others begin
            if not isinstance(error, MelldError):
                log.exception("failed: %s", start)
            if wanted.request not in self._executor.moves:  # else its deadline ends it
                self.planner.ended(wanted.request)
                self._call_off(Deferred(wanted, self._clock()), str(error))
            return
        self._planned[wanted.request] = start.via
        self._chosen.pop(wanted.request, None)
        for future in self._waiters.pop(wanted.request, ()):
            if not future.done():
                future.set_result(move)

    def _paces(self, wanted: Wanted) -> dict[Via, MovePace]:
        """The ways on which it is more than a boundary lets through in one epoch."""
        epoch_s, paces = self.planner.boundaries.epoch_s, {}
        for via, cost in ((Via.KV, wanted.kv_bytes), (Via.TOKENS, wanted.tokens)):
            if cost > (per_epoch := self.planner.per_epoch(wanted, via)):
                paces[via] = MovePace(per_epoch / epoch_s, cost / per_epoch * epoch_s)
        return paces

    def _call_off(self, deferred: Deferred, why: str) -> None:
        """The scheduler counts it on both workers until it hears of this."""
        wanted = deferred.wanted
        way = wanted.request, wanted.source, wanted.destination, wanted.cause
        log.info("move of %s (%s -> %s, event #%d) cancelled: %s", *way, why)
        self._forget(deferred, why)
        self._tell(
            events.MoveAborted(
                self._clock(), request=wanted.request, reason=why, destination=wanted.destination, cause=wanted.cause
            )
        )

    def _forget(self, deferred: Deferred, why: str) -> None:
        request = deferred.wanted.request
        self._chosen.pop(request, None)
        for future in self._waiters.pop(request, ()):
            if not future.done():
                future.set_exception(MoveCalledOff(request, why))
