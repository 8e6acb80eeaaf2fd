"""Puts idle workers to sleep and stops them, by a rule applied several times a second.

in use ──► not needed ──sleep_after_s──► asleep ──stop_after_s──► stopped
"""

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec

from melld.control.status import WorkerState
from melld.engine.fleet.fleet import Fleet
from melld.ids import WorkerId
from melld.scheduler.view import ClusterView

log = logging.getLogger("melld.idle")
LOOK_S = 0.25
SLEEP_AFTER_S = 60.0


class IdleSettings(msgspec.Struct, frozen=True):
    """`sleep_after_s`: without requests until a worker sleeps.  `stop_after_s`: asleep until its process ends."""

    sleep_after_s: float
    stop_after_s: float


class IdleWorkers:
    """The idle workers of one fleet."""

    def __init__(self, fleet: Fleet, cluster: ClusterView, settings: IdleSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self._fleet = fleet
        self._cluster = cluster
        self._clock = clock
        self._since_s: dict[tuple[WorkerId, bool], float] = {}
        """Since when a worker is at rest; whether it sleeps."""

    async def run(self) -> None:
        """Look every `LOOK_S`, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Send each worker that has been at rest long enough one step further."""
        now_s, earlier, self._since_s = self._clock(), self._since_s, {}
        in_use = self._cluster.active.keys() | self._cluster.draining.keys()
        for worker, place in self._fleet.places.items():
            if worker not in self._cluster.workers or not place.is_ready or worker in in_use:
                continue
            sleeps = place.state is WorkerState.ASLEEP
            since_s = self._since_s[worker, sleeps] = earlier.get((worker, sleeps), now_s)
            if sleeps and now_s - since_s >= self._stop_after_s:
                log.info("%s: not needed, stopping it; its last start took %.1f s", worker, place.wake_s)
                self._fleet.stop_worker(worker)
            elif not sleeps and now_s - since_s >= self.settings.sleep_after_s:
                log.info("%s: not needed, putting it to sleep", worker)
                self._fleet.supervisor.sleep(worker)

    def outlook(self, worker: WorkerId) -> str:
        """Say when a sleeping worker's process will end; empty if it will not."""
        since_s = self._since_s.get((worker, True))
        if since_s is None or math.isinf(self._stop_after_s):
            return ""
        return f"its process exits in {max(since_s + self._stop_after_s - self._clock(), 0.0):.0f} s"

    @property
    def _stop_after_s(self) -> float:
        """Several models' processes are stopped by their owner alone."""
        return self.settings.stop_after_s if self._fleet.supervisor.owner.wants_all else math.inf
