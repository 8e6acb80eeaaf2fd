"""Columns of numbers for the requests that workers hold: the progress and size of each.

Owns progress and sizes between epochs.  Never talks to the scheduler and knows nothing of moves or queues.

Tokens grow linearly: from `since_s` on, a request emits `pace[worker]` tokens a second.  The paces are set once an
epoch (`replan`) from the batch and context of each worker; arrivals within an epoch do not slow the others until the
next one.  A request that is still being prefilled has its `since_s` in the future.

The numbers of one request lie together, so that one call writes them.  Each column is a `memoryview`, fast for single
values, and a numpy view of the same memory, fast in bulk: `worker` and `workers`, `told_bytes` and `all_told_bytes`.
"""

import struct

import numpy as np
import numpy.typing as npt

from melld.ids import RequestId
from melld.simulator.latency import Latency
from melld.simulator.run import Run

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
PREFILL_CHUNK_TOKENS = 2048
FIRST_ROWS = 64
RECORD = struct.Struct("=qqqqqqdd")  # of one row: six columns of integers and two of floats
ROW_BYTES = RECORD.size
COLUMNS = ROW_BYTES // 8
write = RECORD.pack_into


class Running:
    """Columns by row (one per placed request) and by worker.  Rows are reused.

    `held`: the request's blocks are in memory (it has not been preempted).  `told_bytes`: its size as last reported.
    `debt_s`: prefill work that a worker has accepted and that has not slowed its decodes yet; `foreign_s`: the same for
    moved requests, which get at most `foreign_share` of its time.  `stretch`: how many times longer than alone a prompt
    takes on the worker, because each of its chunks shares a step with the decodes.
    """

    def __init__(self, latency: Latency, block_tokens: int, block_bytes: int, foreign_share: float = 0.0) -> None:
        self.latency = latency
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.rows = 0
        self._settled = 0
        self.ids: list[RequestId] = []
        self.runs: list[Run] = []
        self.pace: list[float] = []
        self.stretch: list[float] = []
        self.debt_s: list[float] = []
        self.foreign_s: list[float] = []
        self.foreign_share = foreign_share
        self._free: list[int] = []
        self._chunk_s = latency.prefill_s(PREFILL_CHUNK_TOKENS)
        self._paces = np.zeros(0)
        self.steps = np.zeros(0), np.zeros(0), np.zeros(0)
        """Of this epoch, by worker: seconds of a step without prompts, its batch, its context."""
        self._make_room(FIRST_ROWS, b"", b"")

    def add_workers(self, count: int) -> None:
        """Add `count` idle workers."""
        idle = 1.0 / self.latency.step_s(np.ones(count), np.zeros(count))
        self._paces = np.concatenate((self._paces, idle))
        self.pace = self._paces.tolist()
        self.stretch += [1.0] * count
        self.debt_s += [0.0] * count
        self.foreign_s += [0.0] * count

    def add(self, run: Run, worker: int, since_s: float) -> int:
        """Return a new row for a request that is placed on the worker and has its first token at `since_s`.

        Runs once per request: written for speed.
        """
        if self._free:
            row = self._free.pop()
            self.ids[row] = run.id
            self.runs[row] = run
        else:
            row = self.rows
            self.rows += 1
            self.ids.append(run.id)
            self.runs.append(run)
            if row == len(self.held):
                self._make_room(2 * row, self._table, self.held)
        self._settled += 1
        at, first = row * ROW_BYTES, 1.0  # prefill emits the first token
        write(
            self._table, at, run.index, worker, self._settled, run.prompt, run.output, run.prompt_bytes, first, since_s
        )
        self.held[row] = 1
        return row

    def remove(self, row: int) -> None:
        """Free the row of a request that has ended."""
        self.held[row] = 0
        self._free.append(row)

    def settle(self, row: int, worker: int) -> None:
        """Assign the request to that worker, as its latest."""
        self._settled += 1
        self.worker[row] = worker
        self.order[row] = self._settled

    def held_rows(self) -> Integers:
        """Return the rows whose blocks are in memory, shape [held]."""
        rows: Integers = self.all_held[: self.rows].nonzero()[0]
        return rows

    def prefilling(self, worker: int, now_s: float) -> list[Run]:
        """Return the worker's requests that emit nothing yet: their prompts wait, or are being computed."""
        rows = ((self.workers == worker) & (self._since_s > now_s))[: self.rows] & self.all_held[: self.rows]
        return [self.runs[row] for row in rows.nonzero()[0].tolist()]

    def tell(self, rows: Integers, sizes: Integers) -> dict[RequestId, int]:
        """Store these sizes as reported now; return the report."""
        self.all_told_bytes[rows] = sizes
        return dict(zip(map(self.ids.__getitem__, rows.tolist()), sizes.tolist(), strict=True))

    def advance(self, rows: Integers, now_s: float) -> Integers:
        """Advance the rows to the current time; return the bytes that each needs, shape [rows]."""
        since = self._since_s[rows]
        emitted = np.maximum(now_s - since, 0.0) * self._paces[self.workers[rows]]
        generated = np.minimum(self._generated[rows] + emitted, self._output[rows])
        self._generated[rows] = generated
        self._since_s[rows] = np.maximum(since, now_s)
        tokens = self._prompt[rows] + generated.astype(np.int64)
        needed: Integers = -(-tokens // self.block_tokens) * self.block_bytes
        return needed

    def advance_one(self, row: int, now_s: float) -> None:
        """Advance one row to the current time, at its worker's pace."""
        since_s = self.since_s[row]
        if since_s < now_s:
            emitted = (now_s - since_s) * self.pace[self.worker[row]]
            self.generated[row] = min(self.generated[row] + emitted, self.output[row])
            self.since_s[row] = now_s

    def tokens(self, row: int) -> int:
        """Return one row's prompt and emitted tokens, as of its last advance."""
        return int(self.prompt[row] + self.generated[row])

    def need_bytes(self, row: int) -> int:
        """Return the bytes of one row's blocks, as of its last advance."""
        return -(-self.tokens(row) // self.block_tokens) * self.block_bytes

    def end_s(self, row: int) -> float:
        """Return when the row emits its last token at its worker's current pace."""
        left = self.output[row] - self.generated[row]
        return self.since_s[row] + left / self.pace[self.worker[row]]

    def replan(self, now_s: float, epoch_s: float) -> tuple[Integers, Floats]:
        """Set every worker's pace for the epoch that begins now.

        Returns the rows that will end within it and their end times, both of shape [ending].
        """
        rows = self.held_rows()
        worker, since, generated = self.workers[rows], self._since_s[rows], self._generated[rows]
        decoding = since <= now_s
        count, decodes = len(self.pace), worker[decoding]
        batch: Floats = np.bincount(decodes, minlength=count).astype(np.float64, copy=False)
        tokens = self._prompt[rows] + generated
        context = np.bincount(decodes, weights=tokens[decoding], minlength=count).astype(np.float64, copy=False)
        step_s = self.latency.step_s(np.maximum(batch, 1.0), context)
        self.steps = step_s, batch, context
        if self._chunk_s:
            self.stretch = np.where(batch, 1.0 + step_s / self._chunk_s, 1.0).tolist()
        self._paces = (1.0 - self._prefilled(step_s, epoch_s)) / step_s
        self.pace = self._paces.tolist()
        end = np.maximum(since, now_s) + (self._output[rows] - generated) / self._paces[worker]
        soon = end <= now_s + epoch_s
        return rows[soon], end[soon]

    def _prefilled(self, step_s: Floats, epoch_s: float) -> Floats:
        """Return the share of the epoch that each worker's prefill takes from its decodes, and settle that debt.

        A worker's own prompts take at most a chunk in each step; moved requests at most their share of the epoch.
        """
        most_s = epoch_s * self._chunk_s / (step_s + self._chunk_s)
        debt_s = np.array(self.debt_s)
        paid_s = np.minimum(debt_s, most_s)
        self.debt_s = (debt_s - paid_s).tolist()
        if any(self.foreign_s):
            foreign_s = np.array(self.foreign_s)
            beside_s = np.minimum(foreign_s, np.minimum(self.foreign_share * epoch_s, most_s - paid_s))
            self.foreign_s = (foreign_s - beside_s).tolist()
            paid_s += beside_s
        taken: Floats = paid_s / epoch_s
        return taken

    def _make_room(self, rows: int, table: bytes | bytearray, held: bytes | bytearray) -> None:
        """Make columns for `rows` rows, beginning with those of the table."""
        self._table = bytearray(table) + bytes(rows * ROW_BYTES - len(table))
        self.held = bytearray(held) + bytes(rows - len(held))
        integers, floats = memoryview(self._table).cast("q"), memoryview(self._table).cast("d")
        self.worker, self.order, self.prompt, self.output, self.told_bytes = (
            integers[column::COLUMNS] for column in range(1, 6)
        )
        self.generated, self.since_s = floats[6::COLUMNS], floats[7::COLUMNS]
        self.indexes, self.workers, self.orders, self._prompt, self._output, self.all_told_bytes = (
            np.frombuffer(self._table, dtype=np.int64)[column::COLUMNS] for column in range(6)
        )
        self._generated, self._since_s = (
            np.frombuffer(self._table, dtype=np.float64)[column::COLUMNS] for column in (6, 7)
        )
        self.all_held = np.frombuffer(self.held, dtype=np.bool_)
