"""When a worker that has no requests sleeps, when its process ends, and when it had better be kept for a while.

Owns the times since which workers are not needed, and what is known of how soon so many were needed again.  Pure: time
is an argument.  Never touches a worker.

    in use ──► not needed ──sleep_after_s──► asleep ──stop_after_s, or longer──► stopped

Longer: a process that ends costs a start when it is needed again.  Where so many workers at once have of late been
needed again within `BREAK_EVEN` starts, the last of them is kept that long.
"""

import collections
from collections.abc import Sequence
from statistics import fmean

import msgspec

from melld.ids import WorkerId

BREAK_EVEN = 4.0
"""A worker that is needed again within so many times its wake time is not worth stopping."""
GAPS = 8
"""How many of the latest times between two needs count."""


class IdleSettings(msgspec.Struct, frozen=True):
    """`sleep_after_s`: without requests until a worker sleeps.  `stop_after_s`: asleep until its process ends."""

    sleep_after_s: float = 60.0
    stop_after_s: float = 240.0


class Need:
    """How many workers are in use at once, and how soon that many are needed again."""

    def __init__(self) -> None:
        self._count = 0
        self._fell_s: dict[int, float] = {}  # by number of workers: since when fewer are in use
        self._gaps_s: dict[int, collections.deque[float]] = {}

    def changed(self, count: int, now_s: float) -> None:
        """So many are in use now."""
        for level in range(self._count + 1, count + 1):
            if (fell_s := self._fell_s.pop(level, None)) is not None:
                self._gaps_s.setdefault(level, collections.deque(maxlen=GAPS)).append(now_s - fell_s)
        for level in range(count + 1, self._count + 1):
            self._fell_s[level] = now_s
        self._count = count

    def gap_s(self, count: int) -> float | None:
        """From the end of the need for so many to the next one, on average of late; None if that has not been seen."""
        gaps_s = self._gaps_s.get(count)
        return fmean(gaps_s) if gaps_s else None


class WorkerAtRest(msgspec.Struct, frozen=True):
    """A warm worker that is not in use: `rank` orders those that would be woken first, `asleep` says that it sleeps."""

    worker: WorkerId
    rank: int
    asleep: bool
    wake_s: float


class Rest(msgspec.Struct, frozen=True):
    """What is to be done now."""

    sleep: tuple[WorkerId, ...] = ()
    stop: tuple[WorkerId, ...] = ()


class Ending(msgspec.Struct, frozen=True):
    """When a sleeping worker's process ends if nothing happens.

    `kept`: that is later than `stop_after_s`, as it is likely to be needed before.
    """

    at_s: float
    kept: bool


class Idle:
    """The rule.  `endings`: what it says of those that sleep, as of its last look."""

    def __init__(self, settings: IdleSettings) -> None:
        self.settings = settings
        self.need = Need()
        self.endings: dict[WorkerId, Ending] = {}
        self._since_s: dict[tuple[WorkerId, bool], float] = {}

    def look(self, in_use: int, at_rest: Sequence[WorkerAtRest], now_s: float) -> Rest:
        """Decide, given how many warm workers are in use and which are not.  The last to be woken is stopped first."""
        self.need.changed(in_use, now_s)
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
        """How long the last of so many warm workers sleeps before it is stopped."""
        gap_s = self.need.gap_s(warm)
        worth_s = BREAK_EVEN * wake_s
        if gap_s is None or gap_s >= worth_s:
            return self.settings.stop_after_s
        return max(self.settings.stop_after_s, worth_s)
