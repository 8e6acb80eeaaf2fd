"""Carries events to the scheduler and its commands to the fleet.

Owns the scheduler's clock and its epochs.  Decides nothing.

    fleet ──event──► driver ──► Scheduler.handle ──commands──► driver ──► fleet.requests.place / refuse
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from melld.control.messages import AlreadyThere
from melld.driver.drain import Drains
from melld.driver.executor import Executor
from melld.driver.loans import Loans
from melld.driver.moves import Asked, WantedMoves
from melld.driver.news import News
from melld.driver.queue import RequestQueue
from melld.driver.report import MoveReport
from melld.engine.fleet.fleet import Fleet
from melld.errors import MelldError, RequestTooLarge, UnknownRequest
from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.migrate.migration import Migration
from melld.migrate.planner import Planner
from melld.migrate.snapshot import MoveRefusal, MoveRefused, Via
from melld.scheduler import events
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.view import ClusterView

log = logging.getLogger("melld.driver")
Tap = Callable[[events.AnyEvent, Sequence[events.AnyCommand], Mapping[RequestId, str]], None]


class NoRoomAsked(MelldError):
    """The worker that an operator named has no room for the request now."""

    status = 409
    code = "no_room"

    def __init__(self, request: str, worker: str) -> None:
        super().__init__(f"{worker} is not awake or has no room for {request} right now: the request stays where it is")


class NotCarriedOut(MelldError):
    """A bug in melld kept a decision about the request from being made or carried out."""

    code = "not_carried_out"

    def __init__(self, error: Exception) -> None:
        super().__init__(f"melld failed to schedule the request: {type(error).__name__}: {error}")


class Driver:
    """A fleet's scheduler at work.

    `taps` hear of every event, its commands, and the ways of the moves among them, after they were carried out.
    `on_rest` is called after the last of the events at hand has been handled.  `loans`: those of several models.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        fleet: Fleet,
        executor: Executor,
        planner: Planner,
        taps: Sequence[Tap],
        clock: Callable[[], float],
        epoch_s: float,
        on_rest: Callable[[], None] = lambda: None,
        loans: Loans | None = None,
    ) -> None:
        self.queue = RequestQueue(fleet, clock)
        self.wanted = WantedMoves(fleet, executor, planner, clock, self.handle)
        self.drains = Drains(fleet, scheduler.cluster, clock, self.handle)
        self.loans = loans or Loans(clock)
        self.loans.drains.append(self.drains)
        self.news = News(fleet, scheduler.cluster, clock, self.handle)
        self.suspensions = 0
        self._on_rest = on_rest
        self._fleet = fleet
        self._clock = clock
        self._epoch_s = epoch_s
        self._events: deque[events.AnyEvent] = deque()
        self._handling: EventId | None = None
        self._told = NO_EVENT
        self._told_s = 0.0
        self._scheduler = scheduler
        self._cluster: ClusterView = scheduler.cluster
        self.executor = executor
        self._taps = list(taps)

    def add_tap(self, tap: Tap) -> None:
        """Have `tap` hear of every event from now on."""
        self._taps.append(tap)

    def handle(self, event: events.AnyEvent) -> None:
        """Tell the scheduler of an event and carry out its commands; events that these cause are handled afterwards.

        Events are numbered here.  An event that names no cause and arrives while another is handled was caused by
        that one.  One that others overtook, as of two that happen together, gets the time of the last of those.
        """
        self._told = EventId(self._told + 1)
        self._told_s = max(event.at_s, self._told_s)
        cause = event.cause or self._handling or NO_EVENT
        self._events.append(msgspec.structs.replace(event, at_s=self._told_s, id=self._told, cause=cause))
        if self._handling is not None:
            return
        try:
            while self._events:
                event = self._events.popleft()
                self._handling = event.id
                self._take(event)
        finally:
            self._handling = None
        self._on_rest()

    @property
    def is_busy(self) -> bool:
        """Return True while an event is handled: one that comes now is handled after it."""
        return self._handling is not None

    def _take(self, event: events.AnyEvent) -> None:
        """Handle one event to its end; a step that fails is logged and stops no other step."""
        if self.wanted.is_stale(event):
            self._try(event, self.wanted.heard, event)
            return
        commands = self._decide(event)
        is_epoch = isinstance(event, events.EpochStarted)
        self._try(event, self.wanted.heard, event)
        self._try(event, self.queue.heard, event)
        for command in commands:
            if (error := self._try(command, self._obey, command, is_epoch)) is not None:
                self._try(command, self._give_up, command, NotCarriedOut(error))
        if is_epoch:
            self._try(event, self.wanted.plan)
        self._try(event, self.drains.heard, event)
        moved = [command.request for command in commands if isinstance(command, events.MoveRequest)]
        ways = {one: str(via) for one in moved if (via := self.wanted.way_of(one)) is not None}  # else cancelled
        for tap in self._taps:
            self._try(event, tap, event, commands, ways)

    def _decide(self, event: events.AnyEvent) -> list[events.AnyCommand]:
        """Return the scheduler's commands; if it fails on a new request, end that request."""
        decided: list[events.AnyCommand] = []
        error = self._try(event, lambda: decided.extend(self._scheduler.handle(event)))
        if error is None:
            return decided
        if isinstance(event, events.RequestArrived):
            self._try(event, self._end, event.request, NotCarriedOut(error))
        return self._scheduler.cluster.take_commands()  # decided before it failed, and already booked

    def _try(self, what: msgspec.Struct, act: Callable[..., None], *arguments: Any) -> Exception | None:
        """Do one step; log and return the exception if it fails."""
        try:
            act(*arguments)
        except Exception as error:  # the boundary of one step: the others go on, and no caller fails
            log.exception("failed: %s", what)
            return error
        return None

    def _give_up(self, command: events.AnyCommand, error: MelldError) -> None:
        """Tell the client and the scheduler that a command was not carried out."""
        match command:
            case (
                events.PlaceRequest()
                | events.QueueRequest()
                | events.SuspendRequest()
                | events.ShedRequest()
                | events.RefuseRequest()
            ):
                self._end(command.request, error)
            case events.MoveRequest():
                self.wanted.planner.drop(command.request)
                how = command.request, str(error), command.destination
                self.handle(events.MoveAborted(self._clock(), *how, cause=command.cause))

    def _end(self, request: RequestId, error: MelldError) -> None:
        """End a request with an error, in the fleet and in the scheduler."""
        self._fleet.requests.end(request, error)
        self.handle(events.RequestFinished(self._clock(), request=request))

    async def migrate(
        self, request: RequestId, destination: WorkerId, via: Via | None, after_first_token: bool = False
    ) -> MoveReport | AlreadyThere:
        """Move a request for an operator and pin it there; return when the move is committed or cancelled.

        `request`: its id, or a part of it that no other request has.  `after_first_token`: see `MoveRequest`; by KV.

        Raises:
            MelldError: the move could not start.
        """
        request = self._find(request)
        self._fleet.place_of(destination)
        if self.wanted.way_of(request) is not None:
            raise MoveRefused(request, MoveRefusal.ALREADY_LEAVING)
        if self._fleet.live[request].worker == destination:
            self.handle(events.MoveAsked(self._clock(), request=request, destination=destination))
            return AlreadyThere(request=request, worker=destination, pinned=self.is_pinned(request))
        self.executor.check_link(request, destination, Via.KV if after_first_token else via)
        answer: asyncio.Future[MoveReport] = asyncio.get_running_loop().create_future()
        self.wanted.asked[request] = Asked(via, after_first_token, answer)
        try:
            self.handle(events.MoveAsked(self._clock(), request=request, destination=destination))
            if self.wanted.way_of(request) is None and not answer.done():
                raise NoRoomAsked(request, destination)
        except BaseException:
            self.wanted.asked.pop(request, None)
            raise
        return await answer

    def is_pinned(self, request: RequestId) -> bool:
        """Return True if an operator has pinned the request to its worker or destination."""
        known = self._cluster.requests.get(request)
        return known is not None and known.pinned

    def _find(self, name: str) -> RequestId:
        alike = [name] if name in self._fleet.live else [request for request in self._fleet.live if name in request]
        if len(alike) != 1:
            raise UnknownRequest(name, alike)
        return RequestId(alike[0])

    def check_queue(self, client: str, priority: int) -> None:
        """Refuse a request that the full queue would send away at once.

        Raises:
            QueueFull
        """
        if self._scheduler.would_shed(client, priority):
            self.queue.refuse()

    def migration_of(self, request: RequestId) -> Migration | None:
        """Return the request's migration under way, or None."""
        move = self.executor.moves.get(request)
        return move.migration if move is not None else None

    async def run(self) -> None:
        """Start an epoch every `epoch_s`, after telling the scheduler what the workers have reported since."""
        while True:
            await asyncio.sleep(self._epoch_s)
            self.news.tell()
            cluster = self._cluster
            if cluster.requests or cluster.active or cluster.draining:  # else there is nothing to plan or to log
                self.handle(events.EpochStarted(self._clock()))

    def _obey(self, command: events.AnyCommand, is_epoch: bool) -> None:
        log.debug("%s", command)
        match command:
            case events.PlaceRequest():
                self.queue.placed(command.request)
                if command.request in self._fleet.live:
                    self._fleet.requests.place(command.request, command.worker, command.cause)
            case events.SuspendRequest():
                if command.request in self._fleet.live:
                    self._fleet.requests.suspend(command.request)
                    self.suspensions += 1
            case events.QueueRequest():
                self.queue.queued(command.request)
            case events.ShedRequest():
                self.queue.send_away(command)
            case events.RefuseRequest():
                too_large = RequestTooLarge(command.request, command.kv_bytes, command.capacity_bytes)
                self._fleet.requests.end(command.request, too_large)
            case events.ActivateWorker():
                self._fleet.supervisor.wake(command.worker)
            case events.RetireWorker():
                self._fleet.supervisor.sleep(command.worker)
            case events.MoveRequest():
                self.wanted.want(command, is_epoch)
