"""Supervises the daemon's own tasks: a failed task is restarted, and the operator is warned.

Owns these tasks, how often each has failed, and when it starts again.  Never looks into one.

    it fails                      its traceback is logged once, a warning stands in the status
    then                          it starts again after 0.1, 1, 10, 60, 60 ... s
    it has run for a minute       the warning goes, and the next rest is the first one again
    a vital one fails             it starts again at once, then after 0.1, 1, 1 s; the fifth failure in a row, each
                                  within 5 s of its start, is told to the daemon

A task must bear being started again wherever it was when it failed.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

log = logging.getLogger("melld.tasks")
RESTS_S = (0.1, 1.0, 10.0, 60.0)
VITAL_RESTS_S = (0.0, 0.1, 1.0)
VITAL_FAILURES = 5
VITAL_HEALTHY_S = 5.0
HEALTHY_S = 60.0


class Work(msgspec.Struct, frozen=True):
    """The work of a task: `start` is called for each run.  A run that returns is over for good."""

    start: Callable[[], Coroutine[Any, Any, None]]
    rests_s: Sequence[float] = RESTS_S
    failures_allowed: float = float("inf")
    """Failures in a row, the last of which is too many."""
    healthy_s: float = HEALTHY_S
    """How long a run must last for what was before to count no more."""


def vital(start: Callable[[], Coroutine[Any, Any, None]]) -> Work:
    """Return work without which no request gets on."""
    return Work(start, VITAL_RESTS_S, VITAL_FAILURES, VITAL_HEALTHY_S)


class _Trouble(msgspec.Struct):
    """The failures of one task in a row."""

    cause: str
    failures: int
    again_s: float
    """When it starts again, or did."""


class Tasks:
    """All tasks that run as long as the daemon.  `on_given_up` gets the name of a vital task that cannot continue."""

    def __init__(self, on_given_up: Callable[[str], None] = lambda _: None) -> None:
        self.restarts: Counter[str] = Counter()
        self._on_given_up = on_given_up
        self._troubles: dict[str, _Trouble] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def keep(self, name: str, work: Work) -> None:
        """Start this work, and start it again whenever it fails."""
        self.restarts[name] += 0
        self._running[name] = asyncio.get_running_loop().create_task(self._keep(name, work), name=name)

    async def cancel(self, *names: str) -> None:
        """Cancel these tasks and forget them, or cancel all; return once they have ended."""
        ending = [self._running.pop(name) for name in names or list(self._running) if name in self._running]
        for name in names:
            self.restarts.pop(name, None)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def troubled(self) -> list[str]:
        """Return the names of the tasks that have failed a short while ago."""
        now_s = time.monotonic()
        return [name for name, trouble in self._troubles.items() if now_s < trouble.again_s + HEALTHY_S]

    def warnings(self) -> list[str]:
        """Return a sentence for each of them."""
        now_s = time.monotonic()
        found = [(name, self._troubles[name]) for name in self.troubled()]
        return [
            f"a bug in melld: the task '{name}' failed ({one.cause}), and "
            + ("runs again" if one.again_s <= now_s else f"restarts in {one.again_s - now_s:.0f} s")
            for name, one in found
        ]

    async def _keep(self, name: str, work: Work) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await work.start()
                return
            except asyncio.CancelledError as error:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                failed: BaseException = error  # it awaited what was cancelled, and is not meant
            except Exception as error:  # noqa: BLE001  the boundary of the task
                failed = error
            trouble = self._note(name, failed, is_new=time.monotonic() - began_s >= work.healthy_s)
            if trouble.failures >= work.failures_allowed:
                log.error("the task '%s' failed %d times in a row", name, trouble.failures)
                self._on_given_up(name)
                return
            rest_s = work.rests_s[min(trouble.failures, len(work.rests_s)) - 1]
            trouble.again_s = time.monotonic() + rest_s
            await asyncio.sleep(rest_s)
            self.restarts[name] += 1

    def _note(self, name: str, failed: BaseException, *, is_new: bool) -> _Trouble:
        """Count a failure; log its traceback unless the last one in this row was the same."""
        before = None if is_new else self._troubles.get(name)
        cause = f"{type(failed).__name__}: {failed}"
        is_known = before is not None and before.cause == cause
        log.error("the task '%s' failed: %s", name, cause, exc_info=None if is_known else failed)
        failures = before.failures + 1 if before is not None else 1
        trouble = self._troubles[name] = _Trouble(cause, failures, float("inf"))
        return trouble
