"""The simulated workers: who is on which, what fits, who is pushed out, how long a migration takes.

Owns the physical truth (as opposed to the scheduler's view of it).  Never decides: it does what commands say, and
what vLLM does on its own when blocks run out: the youngest request of the worker is preempted and recomputed later.
"""

from collections.abc import Iterator

import numpy as np

from melld.ids import RequestId, WorkerId
from melld.simulator.links import Links, Via
from melld.simulator.run import Move, Run, RunState
from melld.simulator.running import Integers, Running
from melld.simulator.settings import SimulatorSettings

SPARE_WORKERS = 16


class Fleet:
    """`awake`: indexes of workers that are activated.  `runs`: requests that have arrived and not ended."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self.settings = settings
        self.running = Running(settings.latency, settings.block_bytes)
        self.runs: dict[RequestId, Run] = {}
        self.awake: set[int] = set()
        self.names: list[WorkerId] = []
        self._indexes: dict[WorkerId, int] = {}
        self._prefill_free_s: list[float] = []
        self._counts: list[int] = []
        self._preempted: dict[int, list[Run]] = {}
        self._moving: dict[RequestId, Run] = {}
        self._links = None if settings.link is None else Links(settings.link)
        self._orders = 0
        self._rows = np.zeros(0, dtype=np.int64)
        self._need_bytes = np.zeros(0, dtype=np.int64)

    # ---- workers

    def missing_workers(self) -> int:
        """How many workers should be added now: all at first, or more whenever few are left asleep."""
        if self.settings.gpus is not None:
            return self.settings.gpus - len(self.names)
        spare = len(self.names) - len(self.awake)
        return 0 if spare >= SPARE_WORKERS else max(SPARE_WORKERS, len(self.awake))

    def add_workers(self, count: int) -> list[tuple[WorkerId, int]]:
        """Make workers; returns their names and machines."""
        added = []
        for index in range(len(self.names), len(self.names) + count):
            name = WorkerId(f"w{index}")
            self._indexes[name] = index
            self.names.append(name)
            self._prefill_free_s.append(0.0)
            self._counts.append(0)
            added.append((name, index // self.settings.gpus_per_machine))
        self.running.add_workers(count)
        return added

    def wake(self, worker: WorkerId, now_s: float) -> None:
        """The worker will compute after its wake time."""
        index = self._indexes[worker]
        self.awake.add(index)
        self._prefill_free_s[index] = now_s + self.settings.wake_s

    def sleep(self, worker: WorkerId) -> None:
        """The worker computes no more."""
        self.awake.remove(self._indexes[worker])

    # ---- requests

    def place(self, run: Run, worker: WorkerId, now_s: float) -> None:
        """The request waits for its turn among the worker's prompts, then decodes."""
        run.row = self.running.add(run, run.prompt, run.output, run.kv_bytes)
        self._settle(run, self._indexes[worker])
        run.first_token_s = self._prefill(run.worker, run.prompt, now_s)
        self.running.since_s[run.row] = run.first_token_s

    def end_s(self, run: Run) -> float:
        """When the run will end at the present pace; never while it is preempted."""
        return self.running.end_s(run.row) if run.state is RunState.RUNNING else float("inf")

    def drop(self, run: Run) -> None:
        """The request has ended: nothing of it is left anywhere."""
        del self.runs[run.id]
        self._moving.pop(run.id, None)
        run.move = None
        self._counts[run.worker] -= 1
        self.running.remove(run.row)

    # ---- moves

    def transfer(self, run: Run, destination: WorkerId, now_s: float) -> tuple[Via, float]:
        """The way that ends sooner, and when; the link or the destination's compute is taken for it."""
        assert self._links is not None
        target, ways = self._indexes[destination], self._links.settings.ways
        self.running.advance_one(run.row, now_s)
        tokens = self.running.tokens(run.row)
        kv_end_s = self._links.kv_end_s(run.worker, target, run.kv_bytes, now_s)
        start_s = max(now_s, self._prefill_free_s[target])
        tokens_end_s = start_s + self._links.settings.delay_s + self.settings.latency.prefill_s(tokens)
        recompute = run.state is RunState.PREEMPTED or Via.KV not in ways
        if recompute or (Via.TOKENS in ways and tokens_end_s < kv_end_s):
            self._prefill(target, tokens, now_s)
            return Via.TOKENS, tokens_end_s
        self._links.take(run.worker, target, kv_end_s)
        return Via.KV, kv_end_s

    def start_move(self, run: Run, destination: WorkerId, via: Via, fails: bool) -> Move:
        """The destination reserves the request's blocks."""
        run.moves += 1
        run.move = Move(self._indexes[destination], via, fails, run.moves)
        self._moving[run.id] = run
        return run.move

    def commit(self, run: Run, now_s: float) -> None:
        """The request goes on at its destination; one that had been preempted is computed anew there."""
        assert run.move is not None
        was_preempted = run.state is RunState.PREEMPTED
        if was_preempted:
            self._preempted[run.worker].remove(run)
        else:
            self.running.advance_one(run.row, now_s)
        del self._moving[run.id]
        self._settle(run, run.move.destination)
        run.move = None
        if was_preempted:
            self._readmit(run, now_s)

    def abort(self, run: Run) -> None:
        """The request stays; the destination's reservation is gone."""
        del self._moving[run.id]
        run.move = None

    # ---- the epoch

    def advance(self, now_s: float) -> None:
        """Every request in memory has come as far as it could."""
        self._rows = self.running.held_rows()
        self._need_bytes = self.running.advance(self._rows, now_s)

    def overflowing(self) -> Iterator[Run]:
        """Push the youngest out of every worker whose requests need more than it has, until the rest fits."""
        running, capacity_bytes = self.running, self.settings.capacity_bytes
        keep = running.held[self._rows]
        rows, need_bytes = self._rows[keep], self._need_bytes[keep]
        used_bytes = self._used_bytes(rows, need_bytes)
        for worker in np.flatnonzero(used_bytes > capacity_bytes).tolist():
            here = np.flatnonzero(running.worker[rows] == worker)
            over_bytes = int(used_bytes[worker]) - capacity_bytes
            youngest_first = here[np.argsort(-running.order[rows[here]])].tolist()
            for place in youngest_first[:-1]:
                if over_bytes <= 0:
                    break
                over_bytes -= int(need_bytes[place])
                run: Run = running.names[rows[place]]
                running.held[run.row] = False
                run.version += 1
                self._preempted.setdefault(worker, []).append(run)
                yield run

    def resume(self, now_s: float) -> dict[RequestId, int]:
        """Take preempted requests back where there is room, the eldest first.  Returns what they hold again."""
        if not any(self._preempted.values()):
            return {}
        resumed: dict[RequestId, int] = {}
        rows = self.running.held_rows()
        need_bytes = self._need_of(rows)
        used_bytes = self._used_bytes(rows, need_bytes)
        for worker, waiting in self._preempted.items():
            waiting.sort(key=lambda run: run.index)
            while waiting and used_bytes[worker] + waiting[0].kv_bytes <= self.settings.capacity_bytes:
                run = waiting.pop(0)
                used_bytes[worker] += run.kv_bytes
                resumed[run.id] = run.kv_bytes
                self._readmit(run, now_s)
        return resumed

    def take_growth(self) -> dict[RequestId, int]:
        """Sizes that have changed since they were last told, of requests in memory."""
        running, rows = self.running, self._rows
        grown = (self._need_bytes != running.told_bytes[rows]) & running.held[rows]
        rows, sizes = rows[grown], self._need_bytes[grown]
        running.told_bytes[rows] = sizes
        told: dict[RequestId, int] = {}
        for run, kv_bytes in zip(running.names[rows].tolist(), sizes.tolist(), strict=True):
            run.kv_bytes = kv_bytes
            told[run.id] = kv_bytes
        return told

    def replan(self, now_s: float, epoch_s: float) -> list[tuple[Run, float]]:
        """Set the paces for the epoch that begins; returns who ends within it, and when."""
        rows, ends_s = self.running.replan(now_s, epoch_s)
        return list(zip(self.running.names[rows].tolist(), ends_s.tolist(), strict=True))

    def check(self) -> None:
        """Assert that no worker holds more than it has.  For tests."""
        rows = self.running.held_rows()
        assert (self._used_bytes(rows, self.running.told_bytes[rows]) <= self.settings.capacity_bytes).all()

    # ---- in one place

    def _need_of(self, rows: Integers) -> Integers:
        """Bytes that the rows need: as just computed for this epoch, else as last told."""
        need = self.running.told_bytes.copy()
        need[self._rows] = self._need_bytes
        return need[rows]

    def _used_bytes(self, rows: Integers, need_bytes: Integers) -> Integers:
        """Bytes in use per worker, reservations for moves included."""
        count = len(self.names)
        used: Integers = np.bincount(self.running.worker[rows], weights=need_bytes, minlength=count).astype(np.int64)
        for run in self._moving.values():
            assert run.move is not None
            used[run.move.destination] += run.kv_bytes
        return used

    def _settle(self, run: Run, worker: int) -> None:
        self._orders += 1
        if run.worker >= 0:
            self._counts[run.worker] -= 1
        self._counts[worker] += 1
        run.worker = worker
        run.version += 1
        self.running.worker[run.row] = worker
        self.running.order[run.row] = self._orders

    def _readmit(self, run: Run, now_s: float) -> None:
        run.become(RunState.RUNNING)
        run.version += 1
        self.running.held[run.row] = True
        end_s = self._prefill(run.worker, self.running.tokens(run.row), now_s)
        self.running.since_s[run.row] = end_s
        if run.first_token_s > now_s:
            run.first_token_s = end_s

    def _prefill(self, worker: int, tokens: int, now_s: float) -> float:
        """Compute so many tokens after what the worker has to prefill already.  Returns when that is done."""
        seconds = self.settings.latency.prefill_s(tokens)
        end_s = max(now_s, self._prefill_free_s[worker]) + seconds
        self._prefill_free_s[worker] = end_s
        if self._counts[worker] > 1:  # alone, it slows nobody
            self.running.debt_s[worker] += seconds
        return end_s
