"""Carries facts to the scheduler and its commands to the fleet.

Owns the scheduler's clock and its epochs.  Decides nothing, runs nothing itself.

    fleet ──event──► driver ──► Scheduler.handle ──commands──► driver ──► fleet.place / refuse
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from melld.control.messages import AlreadyThere
from melld.driver.drain import Drains
from melld.driver.executor import Executor, Link
from melld.driver.moves import WantedMoves
from melld.driver.queue import WaitingLine
from melld.driver.report import MoveReport
from melld.engine.fleet.fleet import Fleet
from melld.errors import MelldError, UnknownRequest
from melld.ids import NO_EVENT, EventId, RequestId, WorkerId
from melld.migrate.migration import Migration
from melld.migrate.planner import Planner
from melld.migrate.snapshot import MoveRefused, Refusal, Via
from melld.scheduler import events
from melld.scheduler.scheduler import Scheduler
from melld.scheduler.view import ClusterView

log = logging.getLogger("melld.driver")
Tap = Callable[[events.AnyEvent, Sequence[events.AnyCommand], Mapping[RequestId, str]], None]


class NoRoomAsked(MelldError):
    """The worker that an operator names cannot take the request now."""

    status = 409
    code = "no_room"

    def __init__(self, request: str, worker: str) -> None:
        super().__init__(f"{worker} has no room for {request} now, or is not awake")


class NotCarriedOut(MelldError):
    """A fault of ours kept a decision about the request from being made, or from being carried out."""

    code = "not_carried_out"

    def __init__(self, error: Exception) -> None:
        super().__init__(f"melld failed to schedule the request: {type(error).__name__}: {error}")


class Driver:
    """One model's scheduler at work on its fleet.

    `taps` hear every event, what was decided on it, and the routes of the moves among that, after it was done.
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
    ) -> None:
        self.line = WaitingLine(fleet, clock)
        self.moves = WantedMoves(fleet, executor, planner, clock, self.handle)
        self.drains = Drains(fleet, scheduler.cluster, clock, self.handle)
        self.preemptions = 0
        self._pushed_out: set[RequestId] = set()
        self._fleet = fleet
        self._clock = clock
        self._epoch_s = epoch_s
        self._events: deque[events.AnyEvent] = deque()
        self._handling: EventId | None = None
        self._told = NO_EVENT
        self._asked: dict[str, Via | None] = {}
        self._scheduler = scheduler
        self._cluster: ClusterView = scheduler.cluster
        self.executor = executor
        self._taps = taps

    def handle(self, event: events.AnyEvent) -> None:
        """Let the scheduler hear of it, and do what it says.  What doing so brings about is handled afterwards.

        Events are numbered here.  One that comes while another is handled was brought about by that one, unless it
        names its cause itself.
        """
        self._told = EventId(self._told + 1)
        cause = event.cause or self._handling or NO_EVENT
        self._events.append(msgspec.structs.replace(event, id=self._told, cause=cause))
        if self._handling is not None:
            return
        try:
            while self._events:
                event = self._events.popleft()
                self._handling = event.id
                self._take(event)
        finally:
            self._handling = None

    def _take(self, event: events.AnyEvent) -> None:
        """One event to its end: whatever fails on the way is told, and ends nothing but itself."""
        if self.moves.is_stale(event):
            self._try(event, lambda: self.moves.heard(event))
            return
        commands = self._decide(event)
        is_epoch = isinstance(event, events.EpochStarted)
        self._try(event, lambda: self.moves.heard(event))
        self._try(event, lambda: self.line.heard(event))
        for command in commands:
            if (error := self._try(command, partial(self._obey, command, is_epoch))) is not None:
                self._try(command, partial(self._give_up, command, NotCarriedOut(error)))
        if is_epoch:
            self._try(event, self.moves.plan)
        self._try(event, lambda: self.drains.heard(event))
        ways = self._ways_of(commands)
        for tap in self._taps:
            self._try(event, partial(tap, event, commands, ways))

    def _decide(self, event: events.AnyEvent) -> list[events.AnyCommand]:
        """The scheduler's answer; a request that it cannot take in ends with that."""
        decided: list[events.AnyCommand] = []
        error = self._try(event, lambda: decided.extend(self._scheduler.handle(event)))
        if error is None:
            return decided
        if isinstance(event, events.RequestArrived):
            self._try(event, lambda: self._end(event.request, NotCarriedOut(error)))
        return self._scheduler.cluster.take_commands()  # decided before it failed, and counted

    def _try(self, what: msgspec.Struct, act: Callable[[], None]) -> Exception | None:
        """Do this; what it raises is logged, and returned."""
        try:
            act()
        except Exception as error:  # the boundary of one step: the others are taken, and no caller is harmed
            log.exception("failed: %s", what)
            return error
        return None

    def _give_up(self, command: events.AnyCommand, error: MelldError) -> None:
        """The command was not carried out: its client is told, and the scheduler."""
        match command:
            case events.PlaceRequest() | events.QueueRequest() | events.ShedRequest() | events.RefuseRequest():
                self._end(command.request, error)
            case events.MoveRequest():
                self.moves.planner.drop(command.request)
                self.handle(
                    events.MoveAborted(
                        self._clock(),
                        request=command.request,
                        reason=str(error),
                        destination=command.destination,
                        cause=command.cause,
                    )
                )

    def _end(self, request: RequestId, error: MelldError) -> None:
        """Nobody knows it any more: its client is told, and the scheduler, whatever it has kept of it."""
        self._fleet.end(request, error)
        self.handle(events.RequestFinished(self._clock(), request=request))

    async def migrate(self, request: RequestId, destination: WorkerId, via: Via | None) -> MoveReport | AlreadyThere:
        """Move a request because an operator says so; returns when it is done, or when it has come to nothing.

        It then stays there, see `Scheduler`.  `request`: its id, or what of it tells it from the others.

        Raises:
            MelldError: it could not even be begun.
        """
        request = self._called(request)
        self._fleet.place_of(destination)
        if request in self.executor.moves:
            raise MoveRefused(request, Refusal.ALREADY_LEAVING)
        if self._fleet.live[request].worker == destination:
            self.handle(events.MoveAsked(self._clock(), request=request, destination=destination))
            return AlreadyThere(request=request, worker=destination, pinned=self.is_pinned(request))
        self.executor.check_link(request, destination, via)
        self._asked[request] = via
        try:
            self.handle(events.MoveAsked(self._clock(), request=request, destination=destination))
        finally:
            del self._asked[request]
        if self.moves.way_of(request) is None:
            raise NoRoomAsked(request, destination)
        return await self.executor.report(await self.moves.begun(request))

    @property
    def links(self) -> Mapping[tuple[WorkerId, WorkerId], Link]:
        """Whether KV can be copied from each worker to each other one."""
        return self.executor.links

    def is_pinned(self, request: RequestId) -> bool:
        """Whether an operator has sent it where it is, or is going."""
        known = self._cluster.requests.get(request)
        return known is not None and known.pinned

    def _called(self, name: str) -> RequestId:
        alike = [name] if name in self._fleet.live else [request for request in self._fleet.live if name in request]
        if len(alike) != 1:
            raise UnknownRequest(name, alike)
        return RequestId(alike[0])

    def check_line(self, client: str, priority: int) -> None:
        """Refuse a request that would be sent away at once.

        Raises:
            QueueFull
        """
        if self._scheduler.would_shed(client, priority):
            self.line.refuse()

    def _ways_of(self, commands: Sequence[events.AnyCommand]) -> Mapping[RequestId, str]:
        """How the moves among the commands, just obeyed, go or will go; those that are off already are left out."""
        ways = {one.request: self.moves.way_of(one.request) for one in commands if isinstance(one, events.MoveRequest)}
        return {request: str(via) for request, via in ways.items() if via is not None}

    def why_deferred(self, request: RequestId) -> str:
        """Why the request's move has not begun; empty if it has, or if there is none."""
        return self.moves.why_deferred(request)

    def migration_of(self, request: RequestId) -> Migration | None:
        """Its migration that is under way."""
        move = self.executor.moves.get(request)
        return move.migration if move is not None else None

    async def run(self) -> None:
        """The epochs: what has grown, then the re-planning."""
        while True:
            await asyncio.sleep(self._epoch_s)
            self._tell_preempted()
            self._tell_sizes()
            cluster = self._cluster
            if cluster.requests or cluster.active or cluster.draining:  # else there is nothing to plan, nor to log
                self.handle(events.EpochStarted(self._clock()))

    def _tell_sizes(self) -> None:
        """What has grown, and then what is shared: of sizes that the scheduler knows."""
        grown = self._news(self._fleet.take_grown())
        if grown:
            self.handle(events.RequestsGrew(self._clock(), kv_bytes=grown))
        for worker in list(self._cluster.workers.values()):
            shared_bytes = min(self._fleet.shared_bytes(worker.id), worker.held_bytes)
            if shared_bytes != worker.shared_bytes:
                self.handle(events.WorkerSharingChanged(self._clock(), worker=worker.id, shared_bytes=shared_bytes))

    def _tell_preempted(self) -> None:
        self._pushed_out &= self._cluster.requests.keys()
        for request in self._fleet.take_preempted():
            if request not in self._pushed_out:
                self._pushed_out.add(request)
                self.preemptions += 1
                self.handle(events.RequestPreempted(self._clock(), request=request))

    def _news(self, sizes: dict[RequestId, int]) -> dict[RequestId, int]:
        """Those that the scheduler would heed: a request that is computed anew may seem to shrink for a while.

        One that vLLM had preempted is told once it holds again what it held.
        """
        known = self._cluster.requests
        news = {}
        for name, kv_bytes in sizes.items():
            request = known.get(name)
            if request is None or request.worker is None or kv_bytes < request.kv_bytes:
                continue
            if kv_bytes > request.kv_bytes or name in self._pushed_out:
                self._pushed_out.discard(name)
                news[name] = kv_bytes
        return news

    def _obey(self, command: events.AnyCommand, is_epoch: bool) -> None:
        log.debug("%s", command)
        match command:
            case events.PlaceRequest():
                self.line.goes_on(command.request)
                if command.request in self._fleet.live:
                    self._fleet.place(command.request, command.worker, command.cause)
            case events.QueueRequest():
                self.line.waits(command.request)
            case events.ShedRequest():
                self.line.send_away(command)
            case events.RefuseRequest():
                self._fleet.refuse(command.request, command.kv_bytes, command.capacity_bytes)
            case events.ActivateWorker():
                self._fleet.wake(command.worker)
            case events.RetireWorker():
                self._fleet.sleep(command.worker)
            case events.MoveRequest():
                asked = command.request in self._asked
                self.moves.want(command, asked, self._asked.get(command.request), is_epoch)
