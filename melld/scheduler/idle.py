"""The rules for idle workers: when they sleep, when their processes end, and when to keep them longer.

Owns since when each worker is not needed, and how soon so many workers were needed again.  Pure: time is an argument.
Never touches a worker.

    in use ──► not needed ──sleep_after_s──► asleep ──stop_after_s, or longer──► stopped

Longer: stopping a process costs a start when it is needed again.  If that many workers at once were recently needed
again within `BREAK_EVEN` starts, the last of them is kept that long.
"""

import collections
import math
from collections.abc import Sequence
from statistics import fmean

import msgspec

from melld.ids import WorkerId

BREAK_EVEN = 4.0
"""Stopping a worker is not worth it if it is needed again within this many times its wake time."""
SLEEP_AFTER_S, STOP_AFTER_S = 60.0, 240.0
GAPS = 32
"""Number of latest gaps that count."""
MARGIN = 1.25
"""The next gap may be longer than one that was seen: a worker that bridges it is kept so many times as long."""


class Gaps:
    """Gaps between two needs of so many workers."""

    def __init__(self) -> None:
        self._count = 0
        self._fell_s: dict[int, float] = {}  # by number of workers: since when fewer are needed
        self._gaps_s: dict[int, collections.deque[float]] = {}

    def needed(self, count: int, now_s: float) -> None:
        """Record how many workers are needed now."""
        for level in range(self._count + 1, count + 1):
            if (fell_s := self._fell_s.pop(level, None)) is not None:
                self._gaps_s.setdefault(level, collections.deque(maxlen=GAPS)).append(now_s - fell_s)
        for level in range(count + 1, self._count + 1):
            self._fell_s[level] = now_s
        self._count = count

    def since_s(self, level: int, now_s: float) -> float:
        """Return for how long fewer than `level` workers have been needed."""
        return now_s - self._fell_s.get(level, now_s)

    def of(self, level: int) -> Sequence[float]:
        """Return the gaps until `level` workers were needed again, in seconds; the latest is last."""
        return self._gaps_s.get(level, ())


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


def kept_s(gaps_s: Sequence[float], price_s: float) -> float:
    """Return how long to keep the worker: least of its cost while kept and of waking it again.

    `price_s`: what waking costs, in seconds of a worker.  Without history as long as that.  A gap that outlasts all
    others, g the longest of them, is borne for t, until t is the price times g / (g + t): the longer it lasts beyond
    them, the less is it thought to end soon.
    """
    if not gaps_s:
        return price_s
    best_s, best = float("inf"), 0.0
    for stay_s in (0.0, *(MARGIN * gap_s for gap_s in sorted(gaps_s))):
        cost_s = sum(min(gap_s, stay_s) + price_s * (gap_s > stay_s) for gap_s in gaps_s)
        if cost_s < best_s:
            best_s, best = cost_s, stay_s
    longest_s = max(gaps_s)
    if best < longest_s:
        return best
    return max(best, (math.sqrt(longest_s**2 + 4.0 * longest_s * price_s) - longest_s) / 2.0)
