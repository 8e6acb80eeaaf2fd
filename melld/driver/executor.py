"""Runs migrations: sends the table's actions to the workers, and their answers, deaths and deadlines to the table.

Owns the migrations under way, the links between workers, and the timers.  Decides nothing: `migration` does.  Copies
no bytes: workers do.

    driver, operator ──start──► Executor ──commands──► fleet ──► workers
          ▲ MoveCommitted, MoveAborted     ◄──answers, deaths, ended requests──┘
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from melld.driver.report import MoveMeters, MoveReport, report_of
from melld.engine.fleet.fleet import Fleet
from melld.engine.wire import messages as wire
from melld.engine.wire.frames import Buffer
from melld.errors import MelldError
from melld.ids import RequestId, WorkerId
from melld.migrate import messages as say
from melld.migrate.migration import Action, Finish, HandOver, Migration, Tell
from melld.migrate.snapshot import MoveRefusal, MoveRefused, Via
from melld.migrate.table import MoveState, Outcome, Sign
from melld.migrate.wish import Wish
from melld.scheduler import events

log = logging.getLogger("melld.migration")
GAP_S = 30.0
"""Longest wait of a report for the first token after a hand-over."""


class NoLink(MelldError):
    """KV cannot be copied between these workers."""

    status = 409
    code = "no_link"

    def __init__(self, source: str, destination: str, why: str) -> None:
        super().__init__(f"KV cannot be copied from {source} to {destination}: {why}; use a move by tokens")


class Move:
    """A migration under way, with its timer.  `answer`: to the operator who ordered it, if one did."""

    def __init__(self, migration: Migration, answer: asyncio.Future[MoveReport] | None) -> None:
        self.migration = migration
        self.answer = answer
        self.snapshot: list[bytes] = []
        self.timer: asyncio.TimerHandle | None = None
        self.gap_s: float | None = None

    @property
    def wish(self) -> Wish:
        """Return what is moved."""
        return self.migration.wish

    @property
    def fell_back(self) -> bool:
        """Return True if it went by tokens though its KV was planned to be copied."""
        return self.wish.planned is Via.KV and self.migration.via is Via.TOKENS


class Executor:
    """All migrations of one fleet."""

    def __init__(
        self, fleet: Fleet, clock: Callable[[], float], meters: MoveMeters, max_moves_per_link: int = 4
    ) -> None:
        self.moves: dict[RequestId, Move] = {}
        self._fleet = fleet
        self._clock = clock
        self._meters = meters
        self._max_moves_per_link = max_moves_per_link
        self.links: dict[tuple[WorkerId, WorkerId], wire.LinkOpened] = {}
        """What the destination last said, by (source, destination) of workers that have been ready."""
        self._gaps: dict[RequestId, Move] = {}
        self._numbers = 0

    # -- called by the driver ----------------------------------------------------------------------------------------

    def start(self, wish: Wish, answer: asyncio.Future[MoveReport] | None = None) -> None:
        """Start to move a request; report to `answer` once the move has ended and the client has its next token.

        Raises:
            MoveRefused: the request is not at the source, or is moving already.
            NoLink: `via` is KV, which cannot be copied there.
        """
        live = self._fleet.live.get(wish.request)
        if live is None or live.worker != wish.source:
            raise MoveRefused(wish.request, MoveRefusal.UNKNOWN)
        if wish.request in self.moves:
            raise MoveRefused(wish.request, MoveRefusal.ALREADY_LEAVING)
        if self.check_link(wish.request, wish.destination, wish.via):
            wish.via = Via.TOKENS
        self._numbers += 1
        wish.move, wish.lease = self._numbers, live.new_lease()
        self.moves[wish.request] = Move(Migration(wish, self._clock()), answer)
        self._start_queued(wish.link)

    def check_link(self, request: RequestId, destination: WorkerId, via: Via | None) -> str:
        """Say why the request's KV cannot be copied to the destination; empty if it can.

        Raises:
            MoveRefused: the request is on no worker.
            NoLink: `via` is KV, which cannot be copied there.
        """
        source = self._fleet.live[request].worker
        if source is None:
            raise MoveRefused(request, MoveRefusal.UNKNOWN)
        none = "no link exists" if self._fleet.are_near(source, destination) else "they are on different machines"
        why_not = self.links[link].failure if (link := (source, destination)) in self.links else none
        if why_not and via is Via.KV:
            raise NoLink(source, destination, why_not)
        return why_not

    # -- called by the fleet -----------------------------------------------------------------------------------------

    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady) -> None:
        """Link the worker's KV memory with that of every other worker, both ways."""
        for other, theirs in self._fleet.ready.items():
            if other != worker:
                self._open(worker, ready, other)
                self._open(other, theirs, worker)

    def worker_lost(self, worker: WorkerId) -> None:
        """End or roll back the worker's migrations, and have the other workers close its KV memory."""
        self.links = {ends: link for ends, link in self.links.items() if worker not in ends}
        for move in list(self.moves.values()):
            source, destination = move.wish.link
            if worker == source:
                self._happened(move, Sign.SOURCE_LOST)
            elif worker == destination:
                self._happened(move, Sign.DESTINATION_LOST)
        for other in self._fleet.ready:
            if other != worker:
                self._fleet.send(other, wire.CloseLink(peer=worker))

    def answered(self, worker: WorkerId, message: Any, payload: list[bytes]) -> None:
        """Handle a worker's answer."""
        if isinstance(message, wire.LinkOpened):
            self.links[WorkerId(message.peer), worker] = message
            what = f"by {message.transport}" if not message.failure else f"cannot be copied: {message.failure}"
            log.info("KV from %s to %s %s", message.peer, worker, what)
            return
        move = self.moves.get(RequestId(message.request))
        if move is None or move.wish.move != message.move:
            return
        if isinstance(message, say.RequestFrozen):
            move.snapshot = payload
        self._act(move, move.migration.answered(message, self._clock()))

    def request_ended(self, request: RequestId) -> None:
        """Cancel the request's migration, if there is one."""
        if (move := self.moves.get(request)) is not None:
            self._happened(move, Sign.GONE)
        self._answer(self._gaps.pop(request, None))

    def resumed(self, request: RequestId, gap_s: float | None) -> None:
        """Note the gap that the client saw, if it had a token before."""
        if (move := self._gaps.pop(request, None)) is not None:
            move.gap_s = gap_s
            if gap_s is not None:
                self._meters.gap(move.migration.via, gap_s)
            self._answer(move)

    # -- the table's actions -----------------------------------------------------------------------------------------

    def _happened(self, move: Move, sign: Sign) -> None:
        if move.migration.state is not MoveState.ENDED:
            self._act(move, move.migration.happened(sign, self._clock()))

    def _late(self, move: Move, number: int) -> None:
        if move.migration.number == number:
            self._happened(move, Sign.LATE)

    def _act(self, move: Move, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell():
                    self._tell(move, action)
                case HandOver():
                    earlier, self._gaps[move.wish.request] = self._gaps.get(move.wish.request), move
                    self._answer(earlier)
                    self._commit(move, action.lease)
                case Finish():
                    self._finish(move, action.outcome)

    def _commit(self, move: Move, lease: int) -> None:
        """Change the owner in the fleet and in the scheduler, with nothing in between."""
        wish, via = move.wish, str(move.migration.via)
        self._fleet.requests.hand_over(wish.request, wish.destination, lease, wish.cause)
        ends = wish.request, wish.destination
        self._fleet.tell(events.MoveCommitted(self._clock(), *ends, via=via, cause=wish.cause))

    def _tell(self, move: Move, tell: Tell) -> None:
        if move.timer is not None:
            move.timer.cancel()
        loop = asyncio.get_running_loop()
        move.timer = loop.call_later(tell.deadline_s, self._late, move, move.migration.number)
        payload: list[Buffer] = []
        match tell.command:
            case say.ReserveBlocks() | say.WarmRequest():
                live = self._fleet.live[move.wish.request]
                payload = [live.core_request, msgspec.msgpack.encode(live.output_token_ids)]
                self._fleet.reserve(live.request, tell.worker, tell.command.token_capacity)
            case say.AttachRequest():
                payload = list(move.snapshot)
        self._fleet.send(tell.worker, tell.command, payload)

    def _finish(self, move: Move, outcome: Outcome) -> None:
        migration, wish = move.migration, move.wish
        if move.timer is not None:
            move.timer.cancel()
        move.snapshot = []
        del self.moves[wish.request]
        self._fleet.ledger.release(wish.destination, wish.request)
        self._answer(move)
        if move.answer is not None and not move.answer.done():  # no token may come
            asyncio.get_running_loop().call_later(GAP_S, self._answer, move, True)
        self._meters.ended(migration, outcome)
        # A policy may ask again and again for a move that cannot start at all.
        never_began = outcome is Outcome.REFUSED and migration.number <= 1
        log.log(logging.DEBUG if never_began else logging.INFO, "%s", report_of(migration, move.gap_s).line())
        if outcome is not Outcome.COMMITTED:
            how = wish.request, outcome, wish.destination
            self._fleet.tell(events.MoveAborted(self._clock(), *how, cause=wish.cause))
        self._start_queued(move.wish.link)

    def _answer(self, move: Move | None, is_late: bool = False) -> None:
        """Report the move to the operator who ordered it, once it has ended and the client has its next token."""
        if move is None or move.answer is None or move.answer.done() or move.migration.state is not MoveState.ENDED:
            return
        if is_late or self._gaps.get(move.wish.request) is not move:
            move.answer.set_result(report_of(move.migration, move.gap_s))

    # -- links -------------------------------------------------------------------------------------------------------

    def _open(self, source: WorkerId, ready: wire.WorkerReady, destination: WorkerId) -> None:
        handle, failure = ready.kv_handle, ready.kv_failure
        if not self._fleet.are_near(source, destination):
            handle, failure = ready.far_kv_handle, ready.far_kv_failure
        if not handle and not failure:
            return
        self.links[source, destination] = wire.LinkOpened(peer=source, failure=failure or "the link is not open yet")
        if not failure:
            self._fleet.send(destination, wire.OpenLink(peer=source), [handle])

    def _start_queued(self, link: tuple[WorkerId, WorkerId]) -> None:
        """Start the link's moves in request order, up to its limit."""
        while True:
            moves = [move for move in self.moves.values() if move.wish.link == link]
            queued = [move for move in moves if move.migration.state is MoveState.QUEUED]
            if not queued or len(moves) - len(queued) >= self._max_moves_per_link:
                return
            self._happened(queued[0], Sign.STARTED)
