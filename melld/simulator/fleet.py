"""The simulated workers: who is on which, what fits, who is pushed out, how long a migration takes.

Owns the physical truth (as opposed to the scheduler's view of it).  Never decides: it does what commands say, and
what vLLM does on its own when blocks run out: the youngest request of the worker is preempted and recomputed later.
A request that is on its way counts on both sides and grows on both; where that no longer fits, its move is off.
"""

from collections.abc import Iterator

import numpy as np

from melld.ids import EventId, RequestId, WorkerId
from melld.migrate.snapshot import Via
from melld.simulator.links import Links
from melld.simulator.run import Move, Run, RunState
from melld.simulator.running import Integers, Running
from melld.simulator.settings import SimulatorSettings

SPARE_WORKERS = 16
Ending = tuple[float, Run, int]
"""When, which run, and the version that it must still have then."""


class Fleet:
    """`awake`: indexes of workers that are activated.  `runs`: requests that have arrived and not ended."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self.settings = settings
        foreign_share = settings.link.prefill_share if settings.link is not None else 0.0
        self.running = Running(settings.latency, settings.block_tokens, settings.block_bytes, foreign_share)
        self.runs: dict[RequestId, Run] = {}
        self.awake: set[int] = set()
        self.names: list[WorkerId] = []
        self._indexes: dict[WorkerId, int] = {}
        self._prefill_free_s: list[float] = []
        self._computes_s: list[float] = []  # from when on
        self._counts: list[int] = []
        self._preempted: dict[int, list[Run]] = {}
        self._moving: dict[RequestId, Run] = {}
        self._prefill_s = settings.latency.prefill_s
        self._links = None if settings.link is None else Links(settings.link)
        self._rows = np.zeros(0, dtype=np.int64)  # those in memory when the epoch began
        self._need_bytes = np.zeros(0, dtype=np.int64)  # what each of all rows needs, as of then

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
            self._computes_s.append(0.0)
            self._counts.append(0)
            added.append((name, index // self.settings.gpus_per_machine))
        self.running.add_workers(count)
        return added

    def wake(self, worker: WorkerId, now_s: float) -> None:
        """The worker will compute after its wake time."""
        index = self._indexes[worker]
        self.awake.add(index)
        self._prefill_free_s[index] = self._computes_s[index] = now_s + self.settings.wake_s

    def index_of(self, worker: WorkerId) -> int:
        """Which of all workers that is."""
        return self._indexes[worker]

    def computes(self, worker: WorkerId, now_s: float) -> bool:
        """Whether the worker is awake and not on its way to it."""
        index = self._indexes[worker]
        return index in self.awake and self._computes_s[index] <= now_s

    def sleep(self, worker: WorkerId) -> None:
        """The worker computes no more."""
        self.awake.remove(self._indexes[worker])

    # ---- requests

    def place(self, run: Run, worker: WorkerId, now_s: float) -> float:
        """The request waits for its turn among the worker's prompts, then decodes.  Returns when it may end.

        Every request passes here once, so it is written for speed: `_settle` and `_prefill` for a new row.
        """
        running, counts, free_s, prefill_s = self.running, self._counts, self._prefill_free_s, self._prefill_s
        index = run.worker = self._indexes[worker]
        seconds, first_s = prefill_s(run.prompt), free_s[index]
        if first_s < now_s:
            first_s = now_s
        first_s += seconds * running.stretch[index]
        free_s[index] = run.first_token_s = first_s
        if counts[index]:
            running.debt_s[index] += seconds
        counts[index] += 1
        run.row = running.add(run, index, first_s)
        return first_s + (run.output - 1) / running.pace[index]

    def kv_bytes(self, run: Run) -> int:
        """The run's size, as last told to the scheduler."""
        return run.prompt_bytes if run.row < 0 else self.running.told_bytes[run.row]

    def end_s(self, run: Run) -> float:
        """When the run will end at the present pace; never while it is preempted."""
        return self.running.end_s(run.row) if run.state is RunState.RUNNING else float("inf")

    def drop(self, run: Run) -> None:
        """The request has ended: nothing of it is left anywhere."""
        del self.runs[run.id]
        if run.move is not None:
            del self._moving[run.id]
            run.move = None
        self._counts[run.worker] -= 1
        self.running.remove(run.row)

    # ---- moves

    def transfer(self, run: Run, destination: WorkerId, via: Via, per_epoch: int, now_s: float) -> float:
        """When a move that begins now will be over; the path or the destination's compute is taken for it.

        Tokens beyond what may be computed in an epoch are computed beside the destination's own prompts.
        """
        assert self._links is not None
        target, link = self._indexes[destination], self._links.settings
        if via is Via.KV:
            for end in (run.worker, target):
                self.running.debt_s[end] += link.copy_cost_s
            return self._links.transfer(run.worker, target, self.kv_bytes(run), now_s)
        tokens = self.tokens(run, now_s)
        if tokens <= per_epoch:
            return self._prefill(target, tokens, now_s) + link.delay_s
        seconds = self._prefill_s(tokens)
        self.running.foreign_s[target] += seconds
        seconds *= self.running.stretch[target]
        return now_s + max(seconds, tokens / per_epoch * self.settings.epoch_s) + link.delay_s

    def tokens(self, run: Run, now_s: float) -> int:
        """Prompt and output of a placed request, as of now."""
        if run.state is RunState.RUNNING:
            self.running.advance_one(run.row, now_s)
        return self.running.tokens(run.row)

    def has_prefilled(self, run: Run, now_s: float) -> bool:
        """Whether all of the request's prompt is in its worker's memory."""
        return run.state is RunState.RUNNING and self.running.since_s[run.row] <= now_s

    def batches(self) -> dict[WorkerId, int]:
        """Requests on each worker that is awake."""
        return {self.names[index]: self._counts[index] for index in self.awake}

    def expect(self, run: Run, destination: WorkerId, via: Via, cause: EventId) -> Move:
        """The request is to move: from now on it counts on its destination too.  `via` may become another."""
        run.moves += 1
        run.move = Move(self._indexes[destination], via, run.moves, cause)
        self._moving[run.id] = run
        return run.move

    def commit(self, run: Run, now_s: float) -> None:
        """The request goes on at its destination; one that had been preempted is computed anew there."""
        assert run.move is not None
        was_preempted, via = run.state is RunState.PREEMPTED, run.move.via
        if was_preempted:
            self._preempted[run.worker].remove(run)
        else:
            self.running.advance_one(run.row, now_s)
        del self._moving[run.id]
        self._settle(run, run.move.destination)
        run.move = None
        if was_preempted:
            self._readmit(run, now_s)
        elif self._links is not None:
            since_s = now_s + self._links.settings.gap_s(via)
            self.running.since_s[run.row] = since_s
            run.first_token_s = min(run.first_token_s, since_s)  # by tokens it may leave before its prompt is done

    def abort(self, run: Run) -> None:
        """The request stays; the destination's reservation is gone."""
        del self._moving[run.id]
        run.move = None

    # ---- the epoch

    def advance(self, now_s: float) -> None:
        """Every request in memory has come as far as it could."""
        running = self.running
        self._rows = running.held_rows()
        self._need_bytes = running.all_told()
        self._need_bytes[self._rows] = running.advance(self._rows, now_s)

    def overflowing(self) -> Iterator[Run]:
        """Push the youngest out of every worker whose requests need more than it has, until the rest fits."""
        running, capacity_bytes = self.running, self.settings.capacity_bytes
        rows = running.held_rows()
        used_bytes = self._used_bytes(rows)
        for worker in (used_bytes > capacity_bytes).nonzero()[0].tolist():
            here = rows[running.workers_of(rows) == worker]
            over_bytes = int(used_bytes[worker]) - capacity_bytes
            for row in here[np.argsort(-running.orders_of(here))].tolist()[:-1]:
                if over_bytes <= 0:
                    break
                over_bytes -= int(self._need_bytes[row])
                run = running.runs[row]
                running.held[row] = 0
                run.version += 1
                self._preempted.setdefault(worker, []).append(run)
                yield run

    def crowding(self) -> Iterator[Run]:
        """The latest moves to every worker that overflows with nobody left to push out, until the rest fits."""
        if not self._moving:
            return
        self.settle_sizes()
        used_bytes = self._used_bytes(self.running.held_rows())
        for run in reversed(list(self._moving.values())):
            assert run.move is not None
            if used_bytes[run.move.destination] > self.settings.capacity_bytes:
                used_bytes[run.move.destination] -= self._need_bytes[run.row]
                yield run

    def resume(self, now_s: float) -> dict[RequestId, int]:
        """Take preempted requests back where there is room, the eldest first.  Returns what they hold again."""
        if not any(self._preempted.values()):
            return {}
        resumed: dict[RequestId, int] = {}
        used_bytes = self._used_bytes(self.running.held_rows())
        for worker, waiting in self._preempted.items():
            waiting.sort(key=lambda run: run.index)
            while waiting:
                row = waiting[0].row
                need_bytes = self.running.need_bytes(row)  # it may have emitted tokens after it was last told
                if used_bytes[worker] + need_bytes > self.settings.capacity_bytes:
                    break
                used_bytes[worker] += need_bytes
                resumed[waiting[0].id] = self.running.told_bytes[row] = self._need_bytes[row] = need_bytes
                self._readmit(waiting.pop(0), now_s)
        return resumed

    def take_growth(self) -> dict[RequestId, int]:
        """Sizes that have changed since they were last told, of requests in memory."""
        running, rows = self.running, self._rows
        sizes = self._need_bytes[rows]
        grown = (sizes != running.told_of(rows)) & running.is_held(rows)
        return running.tell(rows[grown], sizes[grown])

    def settle_sizes(self) -> None:
        """What has been told is what is needed now, of those placed since the epoch began too."""
        self._need_bytes = self.running.all_told()

    def replan(self, now_s: float, epoch_s: float) -> list[Ending]:
        """Set the paces for the epoch that begins; returns who ends within it, the last first."""
        running = self.running
        rows, ends_s = running.replan(now_s, epoch_s)
        last_first = np.lexsort((running.indexes_of(rows), ends_s))[::-1]
        runs = list(map(running.runs.__getitem__, rows[last_first].tolist()))
        return list(zip(ends_s[last_first].tolist(), runs, [run.version for run in runs], strict=True))

    def check(self) -> None:
        """Assert that no worker holds more than it has.  For tests."""
        self.settle_sizes()
        assert (self._used_bytes(self.running.held_rows()) <= self.settings.capacity_bytes).all()

    # ---- in one place

    def _used_bytes(self, rows: Integers) -> Integers:
        """Bytes in use per worker by the rows that are in memory, reservations for moves included."""
        need_bytes, count = self._need_bytes, len(self.names)
        used: Integers = np.bincount(self.running.workers_of(rows), weights=need_bytes[rows], minlength=count)
        used = used.astype(np.int64)
        for run in self._moving.values():
            assert run.move is not None
            used[run.move.destination] += need_bytes[run.row]
        return used

    def _settle(self, run: Run, worker: int) -> None:
        self._counts[run.worker] -= 1
        self._counts[worker] += 1
        run.worker = worker
        run.version += 1
        self.running.settle(run.row, worker)

    def _readmit(self, run: Run, now_s: float) -> None:
        run.become(RunState.RUNNING)
        run.version += 1
        self.running.held[run.row] = 1
        end_s = self._prefill(run.worker, self.running.tokens(run.row), now_s)
        self.running.since_s[run.row] = end_s
        if run.first_token_s > now_s:
            run.first_token_s = end_s

    def _prefill(self, worker: int, tokens: int, now_s: float) -> float:
        """Compute so many tokens after what the worker has to prefill already.  Returns when that is done."""
        seconds = self._prefill_s(tokens)
        end_s = max(now_s, self._prefill_free_s[worker]) + seconds * self.running.stretch[worker]
        self._prefill_free_s[worker] = end_s
        if self._counts[worker] > 1:  # alone, it slows nobody
            self.running.debt_s[worker] += seconds
        return end_s
