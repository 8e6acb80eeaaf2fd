"""Carries facts to the scheduler and its commands to the fleet.

Owns the scheduler's clock and its epochs.  Decides nothing, runs nothing itself.

    fleet ──event──► driver ──► Scheduler.handle ──commands──► driver ──► fleet.place / refuse
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from melld import events
from melld.engine.fleet import Fleet
from melld.scheduler.policies import POLICIES
from melld.scheduler.scheduler import Scheduler, SchedulerSettings

log = logging.getLogger("melld.driver")


class Driver:
    """One model's scheduler at work on its fleet."""

    def __init__(self, fleet: Fleet, policy: str, clock: Callable[[], float], epoch_s: float) -> None:
        self.policy = policy
        self.scheduler = Scheduler(POLICIES[policy], SchedulerSettings())
        self.awake: set[str] = set()
        self.queued: dict[str, float] = {}
        self._fleet = fleet
        self._clock = clock
        self._epoch_s = epoch_s
        self._events: deque[events.AnyEvent] = deque()
        self._handling = False
        fleet.on_event = self.handle

    def handle(self, event: events.AnyEvent) -> None:
        """Let the scheduler hear of it, and do what it says.  What doing so brings about is handled afterwards."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for command in self.scheduler.handle(self._events.popleft()):
                    self._obey(command)
        finally:
            self._handling = False

    async def run(self) -> None:
        """The epochs: what has grown, then the re-planning."""
        while True:
            await asyncio.sleep(self._epoch_s)
            grown = self._fleet.take_grown()
            if grown:
                self.handle(events.RequestsGrew(self._clock(), kv_bytes=grown))
            self.handle(events.EpochStarted(self._clock()))

    def _obey(self, command: events.AnyCommand) -> None:
        log.debug("%s", command)
        match command:
            case events.PlaceRequest():
                self.queued.pop(command.request, None)
                if command.request in self._fleet.live:
                    self._fleet.place(command.request, command.worker)
            case events.QueueRequest():
                self.queued[command.request] = self._clock()
            case events.RefuseRequest():
                self._fleet.refuse(command.request, command.kv_bytes, command.capacity_bytes)
            case events.ActivateWorker():
                self.awake.add(command.worker)
            case events.RetireWorker():
                self.awake.discard(command.worker)
            case events.MoveRequest():
                self.handle(events.MoveAborted(self._clock(), request=command.request, reason="moves are off"))
