"""Tells a process that gets on, however slowly, from one that stands still.

Owns what was last seen of it.  Reads /proc, never touches the process.

    it is stopped (SIGSTOP) and has not computed since the last look      `stopped_looks`
    neither it nor any process that it made has computed or read          `idle_looks`

Looks are counted and not seconds: while melld is stopped, too, nobody looks.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from melld.kvstore.process_meter import with_children

_PROC = Path("/proc")
_Counters = tuple[int, int]
Reach = Literal["itself", "ranks", "all"]
"""Which processes are looked at: with those that it has forked, or all that came of it, which takes a millisecond."""


class Standstill(msgspec.Struct, frozen=True):
    """How many looks in a row have found a process, or one of its ranks, stopped, and all of them idle."""

    stopped_looks: int = 0
    idle_looks: int = 0
    is_out_of_sight: bool = False
    """Nothing is heard of its machine, so that its own silence says nothing."""


class Onlooker:
    """Looks at one process and, as far as it is to reach, at those that it has made."""

    def __init__(self, pid: int, reach: Reach) -> None:
        self._pid = pid
        self.reach = reach
        self._counters: dict[int, _Counters] = {}
        self._seen = Standstill()

    def look(self) -> Standstill:
        """Look once more; what cannot be read gets on."""
        near = [self._pid] if self.reach == "itself" else with_children(self._pid)
        pids = {*near, *_descendants(near)} if self.reach == "all" else near
        found = {pid: seen for pid in pids if (seen := _read(pid)) is not None}
        still = {pid for pid, (_, counters) in found.items() if counters == self._counters.get(pid)}
        self._counters = {pid: counters for pid, (_, counters) in found.items()}
        is_stopped = any(found[pid][0] == "T" for pid in still.intersection(near))
        is_idle = bool(found) and len(still) == len(found)
        self._seen = Standstill(
            self._seen.stopped_looks + 1 if is_stopped else 0, self._seen.idle_looks + 1 if is_idle else 0
        )
        return self._seen


def _descendants(pids: Iterable[int]) -> Iterator[int]:
    """Yield what these processes have made, and what those have: compilers, say."""
    waiting = list(pids)
    while waiting:
        for thread in (_PROC / f"{waiting.pop()}/task").glob("*"):
            try:
                made = [int(pid) for pid in (thread / "children").read_text().split()]
            except OSError:
                continue
            yield from made
            waiting += made


def _read(pid: int) -> tuple[str, _Counters] | None:
    """Return the process's state, and counters of what it has computed and read; None if they cannot be read."""
    try:
        # After the name in brackets: state, 8 others, majflt, another, utime, stime.
        stat = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
        io = dict(line.split(": ") for line in (_PROC / f"{pid}/io").read_text().splitlines())
    except OSError:
        return None
    computed = int(stat[9]) + int(stat[11]) + int(stat[12])
    return stat[0], (computed, int(io["rchar"]) + int(io["read_bytes"]))
