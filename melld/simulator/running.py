"""The requests that workers hold, as columns of numbers: how far each has come, and what it holds.

Owns progress and sizes between epochs.  Never talks to the scheduler and knows nothing of moves or queues.

Tokens grow linearly: from `since_s` on, a request emits `pace[worker]` tokens a second.  The paces are set once an
epoch (`replan`) from the batch and context of each worker; arrivals within an epoch do not slow the others until the
next one.  A request that is still being prefilled has its `since_s` in the future.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from melld.simulator.latency import Latency

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
BLOCK_SHIFT = 4  # blocks of 16 tokens
PREFILL_CHUNK_TOKENS = 2048


def blocks(tokens: Integers) -> Integers:
    """KV blocks that so many tokens need, element-wise."""
    return (tokens + ((1 << BLOCK_SHIFT) - 1)) >> BLOCK_SHIFT


class Running:
    """Columns by row (one per placed request) and by worker.  Rows are reused; `placed` says which are in use.

    `held`: the request's blocks are in memory (it has not been preempted).  `told_bytes`: its size as last reported.
    `debt_s`: prefill work that a worker has accepted and not yet been slowed down for.
    """

    def __init__(self, latency: Latency, block_bytes: int) -> None:
        self.latency = latency
        self.block_bytes = block_bytes
        self.rows = 0
        self._free: list[int] = []
        self.worker = np.zeros(64, dtype=np.int64)
        self.order = np.zeros(64, dtype=np.int64)
        self.prompt = np.zeros(64, dtype=np.int64)
        self.output = np.zeros(64, dtype=np.int64)
        self.told_bytes = np.zeros(64, dtype=np.int64)
        self.generated = np.zeros(64)
        self.since_s = np.zeros(64)
        self.held = np.zeros(64, dtype=np.bool_)
        self.placed = np.zeros(64, dtype=np.bool_)
        self.names = np.zeros(64, dtype=object)
        self.pace = np.zeros(0)
        self.debt_s = np.zeros(0)
        self._chunk_s = latency.prefill_s(PREFILL_CHUNK_TOKENS)

    def add_workers(self, count: int) -> None:
        """So many more workers, idle."""
        idle = self._paces(np.ones(count), np.zeros(count), np.zeros(count))
        self.pace = np.concatenate((self.pace, idle))
        self.debt_s = np.concatenate((self.debt_s, np.zeros(count)))

    def add(self, name: Any, prompt_tokens: int, output_tokens: int, told_bytes: int) -> int:
        """A row for a request that is about to be placed; the caller sets worker, order and since_s."""
        if self._free:
            row = self._free.pop()
        else:
            row = self.rows
            self.rows += 1
            if row == self.worker.size:
                self._double()
        self.names[row] = name
        self.prompt[row] = prompt_tokens
        self.output[row] = output_tokens
        self.told_bytes[row] = told_bytes
        self.generated[row] = 1.0  # prefill emits the first token
        self.held[row] = True
        self.placed[row] = True
        return row

    def remove(self, row: int) -> None:
        """The request has ended."""
        self.held[row] = False
        self.placed[row] = False
        self.names[row] = None
        self._free.append(row)

    def held_rows(self) -> Integers:
        """Rows whose blocks are in memory."""
        return np.flatnonzero(self.held[: self.rows])

    def placed_rows(self) -> Integers:
        """Rows of all requests that have a worker."""
        return np.flatnonzero(self.placed[: self.rows])

    def advance(self, rows: Integers, now_s: float) -> Integers:
        """Bring the rows up to now.  Returns the bytes that each needs, shape [rows]."""
        since = self.since_s[rows]
        emitted = np.maximum(now_s - since, 0.0) * self.pace[self.worker[rows]]
        output = self.output[rows]
        generated = np.minimum(self.generated[rows] + emitted, output)
        self.generated[rows] = generated
        self.since_s[rows] = np.maximum(since, now_s)
        return blocks(self.prompt[rows] + generated.astype(np.int64)) * self.block_bytes

    def advance_one(self, row: int, now_s: float) -> None:
        """Bring one row up to now, at its worker's pace."""
        since_s = self.since_s[row]
        if since_s < now_s:
            emitted = (now_s - since_s) * self.pace[self.worker[row]]
            self.generated[row] = min(self.generated[row] + emitted, self.output[row])
            self.since_s[row] = now_s

    def tokens(self, row: int) -> int:
        """Prompt and emitted tokens of one row, as of its last advance."""
        return int(self.prompt[row] + self.generated[row])

    def end_s(self, row: int) -> float:
        """When the row will have emitted its last token if its worker's pace stays."""
        return float(self.since_s[row] + (self.output[row] - self.generated[row]) / self.pace[self.worker[row]])

    def replan(self, now_s: float, epoch_s: float) -> tuple[Integers, Floats]:
        """Set every worker's pace for the epoch that begins now.

        Returns the rows that will end within it, and when, both of shape [ending].
        """
        rows = self.held_rows()
        worker = self.worker[rows]
        since = self.since_s[rows]
        decoding = since <= now_s
        count = self.pace.size
        batch = np.bincount(worker[decoding], minlength=count).astype(np.float64)
        tokens = self.prompt[rows] + self.generated[rows]
        context = np.bincount(worker[decoding], weights=tokens[decoding], minlength=count).astype(np.float64)
        share = np.minimum(self.debt_s, epoch_s) / epoch_s
        self.debt_s -= share * epoch_s
        self.pace = self._paces(np.maximum(batch, 1.0), context, share)
        end = np.maximum(since, now_s) + (self.output[rows] - self.generated[rows]) / self.pace[worker]
        soon = end <= now_s + epoch_s
        return rows[soon], end[soon]

    def _paces(self, batch: Floats, context_tokens: Floats, prefill_share: Floats) -> Floats:
        """Tokens a second per request of each worker; while it prefills, each chunk lets one decode step through."""
        step_s = self.latency.step_s(batch, context_tokens)
        return (1.0 - prefill_share) / step_s + prefill_share / (step_s + self._chunk_s)

    def _double(self) -> None:
        for name in (
            "worker", "order", "prompt", "output", "told_bytes", "generated", "since_s", "held", "placed", "names"
        ):  # fmt: skip
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))
