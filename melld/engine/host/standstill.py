"""Tells a process that makes progress, however slowly, from one that hangs.

Owns what was last seen of it.  Never touches the process.

    it is stopped (SIGSTOP) and has not computed since the last look      `stopped_looks`
    neither it nor any process that it made has computed or read          `idle_looks`

Looks are counted and not seconds: while melld is stopped, too, nobody looks.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from melld.kvstore.process_meter import UNREADABLE, made_by, with_children

_Counters = tuple[float, int]
Reach = Literal["itself", "ranks", "all"]
"""Which processes are looked at: with those that it has forked, or all that came of it, which takes a millisecond."""


class Standstill(msgspec.Struct, frozen=True):
    """How many looks in a row found a process or one of its ranks stopped, and how many found all of them idle."""

    stopped_looks: int = 0
    idle_looks: int = 0
    is_out_of_sight: bool = False
    """Nothing is heard of its machine, so that its own silence says nothing."""


class Onlooker:
    """Watches one process and, to a given depth, its children."""

    def __init__(self, pid: int, reach: Reach) -> None:
        self.pid = pid
        self.reach = reach
        self._counters: dict[int, _Counters] = {}
        self._seen = Standstill()

    def look(self) -> Standstill:
        """Look once more; unreadable processes count as making progress."""
        near = [self.pid] if self.reach == "itself" else with_children(self.pid)
        pids = {*near, *_descendants(near)} if self.reach == "all" else near
        found = {pid: seen for pid in pids if (seen := _read(pid)) is not None}
        still = {pid for pid, (_, counters) in found.items() if counters == self._counters.get(pid)}
        self._counters = {pid: counters for pid, (_, counters) in found.items()}
        is_stopped = any(found[pid][0] == psutil.STATUS_STOPPED for pid in still.intersection(near))
        is_idle = bool(found) and len(still) == len(found)
        self._seen = Standstill(
            self._seen.stopped_looks + 1 if is_stopped else 0, self._seen.idle_looks + 1 if is_idle else 0
        )
        return self._seen


def _descendants(pids: Iterable[int]) -> Iterator[int]:
    """Yield the descendants of these processes, such as compilers."""
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        try:
            threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:  # it has ended
            continue
        made = [child for thread in threads for child in made_by(pid, thread)]
        yield from made
        waiting += made


def _read(pid: int) -> tuple[str, _Counters] | None:
    """Return the process's state and its counters of CPU time and bytes read; None if unreadable."""
    try:
        with (process := psutil.Process(pid)).oneshot():
            times, io = process.cpu_times(), process.io_counters()
            return process.status(), (times.user + times.system, io.read_chars + io.read_bytes)
    except UNREADABLE:
        return None
