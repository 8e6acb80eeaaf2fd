"""The rule for idle workers: when they sleep, when their processes end, and when to keep them longer.

Owns since when each worker is not needed.  Pure: time is an argument.  Never touches a worker.

    in use ──► not needed ──sleep_after_s──► asleep ──stop_after_s, or longer──► stopped

Longer: stopping a process costs a start when it is needed again.  If that many workers at once were recently needed
again within `BREAK_EVEN` starts, the last of them is kept that long.
"""

from collections.abc import Sequence
from statistics import fmean

import msgspec

from melld.ids import WorkerId
from melld.scheduler.gaps import Gaps

BREAK_EVEN = 4.0
"""Stopping a worker is not worth it if it is needed again within this many times its wake time."""
SLEEP_AFTER_S, STOP_AFTER_S = 60.0, 240.0


class IdleSettings(msgspec.Struct, frozen=True):
    """`sleep_after_s`: without requests until a worker sleeps.  `stop_after_s`: asleep until its process ends."""

    sleep_after_s: float = SLEEP_AFTER_S
    stop_after_s: float = STOP_AFTER_S


class WorkerAtRest(msgspec.Struct, frozen=True):
    """A warm worker that is not in use.  `rank`: the order of waking."""

    worker: WorkerId
    rank: int
    asleep: bool
    wake_s: float


class Rest(msgspec.Struct, frozen=True):
    """Workers to put to sleep and to stop now."""

    sleep: tuple[WorkerId, ...] = ()
    stop: tuple[WorkerId, ...] = ()


class Ending(msgspec.Struct, frozen=True):
    """Time at which a sleeping worker's process ends if it is not needed.

    `kept`: later than `stop_after_s`, because it will probably be needed before.
    """

    at_s: float
    kept: bool


class Idle:
    """The idle rule.  `endings`: the planned ends of sleeping workers, as of the last look."""

    def __init__(self, settings: IdleSettings) -> None:
        self.settings = settings
        self._gaps = Gaps()
        self.endings: dict[WorkerId, Ending] = {}
        self._since_s: dict[tuple[WorkerId, bool], float] = {}

    def look(self, in_use: int, at_rest: Sequence[WorkerAtRest], now_s: float) -> Rest:
        """Decide from the warm workers in use and at rest.  The last to be woken is stopped first."""
        self._gaps.needed(in_use, now_s)
        known = {(one.worker, one.asleep) for one in at_rest}
        self._since_s = {key: since_s for key, since_s in self._since_s.items() if key in known}
        warm = in_use + len(at_rest)
        sleep, stop = [], []
        self.endings = {}
        for one in sorted(at_rest, key=lambda one: -one.rank):
            rested_s = now_s - self._since_s.setdefault((one.worker, one.asleep), now_s)
            if not one.asleep and rested_s >= self.settings.sleep_after_s:
                sleep.append(one.worker)
            elif one.asleep and rested_s >= (delay_s := self.stop_delay_s(warm, one.wake_s)):
                stop.append(one.worker)
                warm -= 1
            elif one.asleep:
                self.endings[one.worker] = Ending(now_s - rested_s + delay_s, delay_s > self.settings.stop_after_s)
        return Rest(tuple(sleep), tuple(stop))

    def stop_delay_s(self, warm: int, wake_s: float) -> float:
        """Return how long the last of `warm` warm workers sleeps before it is stopped."""
        gaps_s = self._gaps.of(warm)
        worth_s = BREAK_EVEN * wake_s
        if not gaps_s or fmean(gaps_s) >= worth_s:
            return self.settings.stop_after_s
        return max(self.settings.stop_after_s, worth_s)
