"""Prints a line every few seconds while the workers load, so that a slow start does not look stuck."""

import asyncio
import time
from collections.abc import Callable, Collection

from melld.control.status import WorkerState
from melld.engine.fleet.place import Place

INTERVAL_S = 5.0


class StartProgress:
    """The progress of one start of the daemon."""

    def __init__(self, places: Callable[[], Collection[Place]], say: Callable[[str], None]) -> None:
        self._places = places
        self._say = say
        self._began_s = time.monotonic()

    def became_ready(self, place: Place) -> None:
        """Say that this worker is ready."""
        self._say(f"melld: {place.slot.worker} is ready on {place.slot.device} ({self._elapsed_s:.1f} s)")

    async def run(self) -> None:
        """Say every `INTERVAL_S` what the other workers do."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._say(f"melld: {self._elapsed_s:.0f} s: {self.line()}")

    def line(self) -> str:
        """Say what the workers do that are not ready, grouped by what they do."""
        by_doing: dict[str, list[str]] = {}
        for place in self._places():
            if not place.is_ready and place.state is not WorkerState.STOPPED:
                by_doing.setdefault(place.doing, []).append(place.slot.worker)
        if not self._places():
            return "waiting for machines to join"
        parts = [f"{', '.join(workers)} {doing}" for doing, workers in by_doing.items()]
        return "; ".join(parts) or "preparing the API"

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
