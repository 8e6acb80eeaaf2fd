"""Take workers' reports: blocks for the ledger, tokens for the log, and how long their steps take.

Owns the order of each worker's reports, what is known of its work, and the writing of the log (its tokens stand with
their requests).  Drops what comes from a worker that does not own the request.  Returns what follows from a report.
"""

import collections
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from melld.engine.fleet.request import Live
from melld.engine.wire import messages as wire
from melld.ids import RequestId, WorkerId
from melld.kvstore.geometry import KvGeometry
from melld.kvstore.ledger import Ledger
from melld.scheduler.pace import Pace


class Turn(enum.StrEnum):
    """What to make of a report."""

    NEXT = "next"
    STALE = "came twice"
    GAP = "one before it is missing"


class WorkerFacts(msgspec.Struct):
    """What is known of a ready worker's work; the next process in its place begins with none of it."""

    index: int
    geometry: KvGeometry
    max_requests: int
    pace: Pace | None = None
    """Where there is a target for the steps' time."""
    tokens: int = 0
    reports: int = 0
    step_s: collections.deque[float] = msgspec.field(default_factory=lambda: collections.deque(maxlen=256))

    def turn(self, number: int) -> Turn:
        """Return what to make of the report of that number; the next one counts as taken.

        The wire keeps its order, so anything but the next one is a fault: after a gap, in which tokens may have been,
        the worker's word is worth nothing.
        """
        if number != self.reports + 1:
            return Turn.STALE if number <= self.reports else Turn.GAP
        self.reports = number
        return Turn.NEXT


class Reported(msgspec.Struct, frozen=True):
    """What a report means for its requests."""

    finished: list[RequestId] = []
    acquitted: list[RequestId] = []
    """They have made enough tokens since the death of a worker."""
    gaps_s: dict[RequestId, float] = {}
    """Those that were handed over or lost their worker: how long after the last output before."""


class Reports:
    """The reports of the workers of these names.

    `limit` is told how many requests a worker may run at once, so that its steps take `itl_target_s` at most; None: as
    long as they like.
    """

    def __init__(
        self,
        names: Iterable[WorkerId],
        live: Mapping[RequestId, Live],
        ledger: Ledger,
        limit: Callable[[WorkerId, int], None],
        itl_target_s: float | None = None,
    ) -> None:
        self.workers: dict[WorkerId, WorkerFacts] = {}
        self.dropped_outputs = 0
        self._itl_target_s = itl_target_s
        self._indices = {worker: index for index, worker in enumerate(names)}
        self._live = live
        self._ledger = ledger
        self._limit = limit
        self._geometry: KvGeometry | None = None

    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady) -> None:
        """It will report, from 1."""
        geometry = self._geometry = KvGeometry(block_tokens=ready.block_tokens, block_bytes=ready.block_bytes)
        pace = Pace(self._itl_target_s, ready.max_requests) if self._itl_target_s is not None else None
        self.workers[worker] = WorkerFacts(self._indices[worker], geometry, ready.max_requests, pace)
        self._ledger.open_worker(worker, geometry, ready.total_blocks)

    def worker_lost(self, worker: WorkerId) -> bool:
        """It reports no more.  False if it did not do so before."""
        self._ledger.close_worker(worker)
        return self.workers.pop(worker, None) is not None

    def kv_bytes(self, tokens: int) -> int:
        """By the geometry of the latest worker: they all run the same model."""
        return self._geometry.bytes_for_tokens(tokens) if self._geometry is not None else 0

    def take(self, worker: WorkerId, done: wire.StepDone, outputs: Any, now_s: float) -> Reported:
        """The next report of that worker; `outputs` is its `EngineCoreOutputs`, or None."""
        facts = self.workers[worker]
        if done.step_s:
            facts.step_s.append(done.step_s)
        blocks = (done.used_blocks, done.total_blocks, done.shared_blocks)
        self._ledger.blocks_changed(worker, blocks, done.blocks, done.gone)  # type: ignore[arg-type]
        if outputs is None:
            return Reported()
        if facts.pace is not None and done.step_s:
            self._limit(worker, facts.pace.stepped(done.step_s, len(outputs.outputs)))
        return self._log(worker, done, outputs, now_s)

    def _log(self, worker: WorkerId, done: wire.StepDone, outputs: Any, now_s: float) -> Reported:
        """Log the owner's tokens; take out of `outputs` what comes from anybody else."""
        reported, kept = Reported(), []
        new_tokens: dict[RequestId, int] = {}
        for output in outputs.outputs:
            live = self._live.get(output.request_id)
            if live is None or not live.is_of(worker, done.leases.get(output.request_id, 0)):
                self.dropped_outputs += 1
                continue
            kept.append(output)
            if live.is_interrupted:
                live.is_interrupted = False
                reported.gaps_s[live.request] = now_s - (live.last_output_s or live.arrived_s)
            live.last_output_s = now_s
            if output.new_token_ids:
                new_tokens[live.request] = len(output.new_token_ids)
                if live.log(output.new_token_ids):
                    reported.acquitted.append(live.request)
            if output.finish_reason is not None:
                reported.finished.append(live.request)
        outputs.outputs = kept
        self.workers[worker].tokens += sum(new_tokens.values())
        unreported = {request: count for request, count in new_tokens.items() if request not in done.blocks}
        self._ledger.tokens_seen(worker, unreported)
        return reported
