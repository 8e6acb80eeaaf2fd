"""The memory of the simulated workers: what fits, what is preempted, which moves find no room.

Owns the sizes of requests between epochs, and does what vLLM does when blocks run out: preempt the worker's youngest
request and recompute it later.  A moving request counts and grows on both sides; if it no longer fits, its move is
cancelled.
"""

from collections.abc import Iterator

import numpy as np

from melld.ids import RequestId
from melld.simulator.run import Run
from melld.simulator.running import Integers, Running


class SimulatedMemory:
    """Memory that the requests in `running` need.  `preempted`: runs by worker index; `moving`: runs with a move."""

    def __init__(self, running: Running, capacity_bytes: int) -> None:
        self.preempted: dict[int, list[Run]] = {}
        self.moving: dict[RequestId, Run] = {}
        self._running = running
        self._capacity_bytes = capacity_bytes
        self._rows = np.zeros(0, dtype=np.int64)  # rows in memory when the epoch began
        self._need_bytes = np.zeros(0, dtype=np.int64)  # need of every row at that time

    def advance(self, now_s: float) -> None:
        """Advance every request in memory to the current time."""
        self._rows = self._running.held_rows()
        self.settle_sizes()
        self._need_bytes[self._rows] = self._running.advance(self._rows, now_s)

    def overflowing(self) -> Iterator[Run]:
        """Preempt and yield the youngest requests of every overfull worker, until the rest fits."""
        running, capacity_bytes = self._running, self._capacity_bytes
        rows, used_bytes = running.held_rows(), self.used_bytes()
        for worker in (used_bytes > capacity_bytes).nonzero()[0].tolist():
            here = rows[running.workers[rows] == worker]
            over_bytes = int(used_bytes[worker]) - capacity_bytes
            for row in here[np.argsort(-running.orders[here])].tolist()[:-1]:
                if over_bytes <= 0:
                    break
                over_bytes -= int(self._need_bytes[row])
                run = running.runs[row]
                running.held[row] = 0
                run.version += 1
                self.preempted.setdefault(worker, []).append(run)
                yield run

    def crowding(self) -> Iterator[Run]:
        """Yield the latest moves to every worker that is overfull with nothing left to preempt, until the rest fits."""
        if not self.moving:
            return
        self.settle_sizes()
        used_bytes = self.used_bytes()
        for run in reversed(list(self.moving.values())):
            assert run.move is not None
            if used_bytes[run.move.destination] > self._capacity_bytes:
                used_bytes[run.move.destination] -= self._need_bytes[run.row]
                yield run

    def readmitted(self) -> Iterator[tuple[Run, int]]:
        """Yield the preempted requests that fit again, the oldest first, and the bytes that they hold now."""
        if not any(self.preempted.values()):
            return
        used_bytes = self.used_bytes()
        for worker, waiting in self.preempted.items():
            waiting.sort(key=lambda run: run.index)
            while waiting:
                row = waiting[0].row
                need_bytes = self._running.need_bytes(row)  # it may have emitted tokens after its last report
                if used_bytes[worker] + need_bytes > self._capacity_bytes:
                    break
                used_bytes[worker] += need_bytes
                self._running.told_bytes[row] = self._need_bytes[row] = need_bytes
                yield waiting.pop(0), need_bytes

    def take_growth(self) -> dict[RequestId, int]:
        """Return the sizes that changed since the last report, of requests in memory."""
        running, rows = self._running, self._rows
        sizes = self._need_bytes[rows]
        grown = (sizes != running.all_told_bytes[rows]) & running.all_held[rows]
        return running.tell(rows[grown], sizes[grown])

    def settle_sizes(self) -> None:
        """Take the reported sizes as the current need, including requests placed since the epoch began."""
        self._need_bytes = self._running.all_told_bytes[: self._running.rows].copy()

    def used_bytes(self) -> Integers:
        """Return the bytes in use per worker, reservations for moves included."""
        running, need_bytes = self._running, self._need_bytes
        rows = running.held_rows()
        used: Integers = np.bincount(running.workers[rows], weights=need_bytes[rows], minlength=len(running.pace))
        used = used.astype(np.int64)
        for run in self.moving.values():
            assert run.move is not None
            used[run.move.destination] += need_bytes[run.row]
        return used
