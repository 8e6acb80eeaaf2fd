"""Starts workers that have died again, each after a rest that grows with its deaths (`Place.back_off_s`).

Owns the rests, and how long a worker must run for its deaths to be forgotten.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from melld.control.status import WorkerState
from melld.engine.fleet.place import Place
from melld.engine.fleet.ports import WorkerListener
from melld.ids import WorkerId

log = logging.getLogger("melld.supervisor")


class Restarts:
    """The restarts of one fleet's workers.  `own` runs a task; `listener` hears of workers that ran for long enough."""

    def __init__(
        self,
        spawn: Callable[[Place], None],
        own: Callable[[Place, Coroutine[Any, Any, None]], None],
        listener: WorkerListener,
        steady_after_s: float,
    ) -> None:
        self._spawn = spawn
        self._own = own
        self._listener = listener
        self._steady_after_s = steady_after_s
        self._steadying: dict[WorkerId, asyncio.TimerHandle] = {}

    def ready(self, place: Place) -> None:
        """Note that the worker is ready: if it died before, it must run for a while from now on."""
        self.forget(place.slot.worker)
        if place.setbacks:
            loop = asyncio.get_running_loop()
            self._steadying[place.slot.worker] = loop.call_later(self._steady_after_s, self._steadied, place)

    def died(self, place: Place, reason: str) -> None:
        """Note that the worker has died."""
        place.died(place.is_ready)
        place.rested_s = asyncio.get_running_loop().time() + place.back_off_s
        place.detail = reason

    def forget(self, worker: WorkerId) -> None:
        """Note that the worker's process has ended."""
        if (timer := self._steadying.pop(worker, None)) is not None:
            timer.cancel()

    def restart(self, place: Place) -> None:
        """Start the dead worker again after its rest, unless its machine is lost or it is given up."""
        if place.is_away:
            return
        if place.given_up:
            then = f"`melld resume {place.slot.worker}` tries again"
            place.detail = f"given up after {place.failed_starts} failed starts ({place.detail}); {then}"
            log.error("%s: %s", place.slot.worker, place.detail)
            return
        place.restarts += 1
        self._own(place, self._start_again(place))

    def hold(self, place: Place, obstacle: str) -> None:
        """Start the dead worker no more: another program fills its device, and the last death was not its own fault."""
        if not place.obstacle:
            place.setbacks -= 1
            place.failed_starts -= 1
            log.warning("%s waits: %s", place.slot.worker, obstacle)
        place.obstacle = obstacle

    def let_go(self, place: Place) -> None:
        """Start the worker: its device is free again."""
        place.obstacle = ""
        if place.state is WorkerState.FAILED and not place.is_owned:
            self.restart(place)

    async def _start_again(self, place: Place) -> None:
        await asyncio.sleep(place.back_off_s)
        if place.may("retry") and not place.is_away and not place.obstacle:
            place.step("retry")
            self._spawn(place)

    async def start_rested(self, place: Place) -> None:
        """Start the worker, which its owner wants, once it has rested since its last death."""
        await asyncio.sleep(max(place.rested_s - asyncio.get_running_loop().time(), 0.0))
        self._spawn(place)

    def _steadied(self, place: Place) -> None:
        place.forgive()
        self._listener.worker_steadied(place.slot)
