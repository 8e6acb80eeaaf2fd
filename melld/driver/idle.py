"""Puts idle workers to sleep and stops them, by a rule applied several times a second.

Owns only the timing.  `scheduler.idle` decides; the fleet acts.
"""

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec

from melld.control.status import WorkerState
from melld.engine.fleet.fleet import Fleet
from melld.ids import WorkerId
from melld.scheduler.idle import Idle, IdleSettings, WorkerAtRest
from melld.scheduler.view import ClusterView

log = logging.getLogger("melld.idle")
LOOK_S = 0.25


class IdleWorkers:
    """The idle workers of one fleet."""

    def __init__(self, fleet: Fleet, cluster: ClusterView, settings: IdleSettings, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._cluster = cluster
        self._clock = clock
        self._idle = Idle(settings)

    def never_stop(self) -> None:
        """Only put workers to sleep from now on: an owner stops them."""
        self._idle.settings = msgspec.structs.replace(self._idle.settings, stop_after_s=math.inf)

    async def run(self) -> None:
        """Apply the rule every `LOOK_S`, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Apply the rule once."""
        at_rest = []
        in_use = 0
        for place in self._fleet.places.values():
            worker = place.slot.worker
            known = self._cluster.workers.get(worker)
            if known is None or not place.is_ready:
                continue
            if worker in self._cluster.active or worker in self._cluster.draining:
                in_use += 1
            else:
                at_rest.append(WorkerAtRest(worker, known.rank, place.state is WorkerState.ASLEEP, place.wake_s))
        rest = self._idle.look(in_use, at_rest, self._clock())
        for worker in rest.sleep:
            log.info("%s: not needed, putting it to sleep", worker)
            self._fleet.sleep(worker)
        for worker in rest.stop:
            wake_s = self._fleet.places[worker].wake_s
            log.info("%s: not needed, stopping it; its last start took %.1f s", worker, wake_s)
            self._fleet.stop_worker(worker)

    def outlook(self, worker: WorkerId) -> str:
        """Say when a sleeping worker's process will end; empty if it will not."""
        ending = self._idle.endings.get(worker)
        if ending is None or math.isinf(ending.at_s):
            return ""
        kept = ", kept longer because it was recently needed again soon after stopping" if ending.kept else ""
        return f"its process exits in {max(ending.at_s - self._clock(), 0.0):.0f} s{kept}"
