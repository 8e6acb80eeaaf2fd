"""What is said while the workers load: nobody looks at a silent terminal, or journal, for a minute.

Owns the words, a line each few seconds.  Waits for nothing.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from melld.engine.fleet.place import Place

INTERVAL_S = 5.0


class StartProgress:
    """One start of the daemon, from its beginning."""

    def __init__(self, places: Collection[Place], say: Callable[[str], None]) -> None:
        self._places = places
        self._say = say
        self._began_s = time.monotonic()

    def became_ready(self, place: Place) -> None:
        """Say which worker is ready."""
        self._say(f"melld: {place.slot.worker} is ready on {place.slot.device} ({self._elapsed_s:.1f} s)")

    async def run(self) -> None:
        """Say how far those are that are not ready, again and again."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._say(f"melld: {self._elapsed_s:.0f} s: {self.line()}")

    def line(self) -> str:
        """What goes on, the workers that do the same together."""
        by_doing: dict[str, list[str]] = {}
        for place in self._places:
            if not place.is_ready:
                by_doing.setdefault(place.doing, []).append(place.slot.worker)
        parts = [f"{', '.join(workers)} {doing}" for doing, workers in by_doing.items()]
        return "; ".join(parts) or "preparing the API"

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
