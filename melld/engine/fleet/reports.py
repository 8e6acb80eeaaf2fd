"""Takes workers' reports: blocks for the ledger, tokens for the requests' log, and how long their steps take.

Owns the order of each worker's reports and what is known of its work.  Drops outputs of a worker that does not own the
request, and tells the sizes of requests by their owners alone.
"""

import collections
import enum
from collections.abc import Callable, Mapping

import msgspec

from melld.engine.fleet.paces import Pace, PaceMeter
from melld.engine.fleet.request import Live
from melld.engine.fleet.step_outputs import Step
from melld.engine.wire import messages as wire
from melld.ids import RequestId, WorkerId
from melld.kvstore.geometry import KvGeometry
from melld.kvstore.ledger import Ledger
from melld.scheduler.events import WorkerPace
from melld.scheduler.steptimes import StepCosts, StepTimes


class Turn(enum.StrEnum):
    """A report's position among its worker's reports."""

    NEXT = "next"
    STALE = "came twice"
    GAP = "an earlier one is missing"


class WorkerFacts(msgspec.Struct):
    """Facts about a ready worker's work.  The next process in its place starts afresh."""

    index: int
    geometry: KvGeometry
    max_requests: int
    pace: Pace | None = None
    """None without a target for the time of a step."""
    tokens: int = 0
    reports: int = 0
    times: StepTimes = msgspec.field(default_factory=StepTimes)
    """What its steps cost."""
    meter: PaceMeter = msgspec.field(default_factory=PaceMeter)
    """What its steps took since the scheduler was last told."""
    step_s: collections.deque[float] = msgspec.field(default_factory=lambda: collections.deque(maxlen=256))

    def turn(self, number: int) -> Turn:
        """Return the position of that report number; the next one counts as taken.

        The wire keeps its order, so anything but the next one is a fault.  After a gap, in which tokens may be lost,
        the worker's reports are worthless.
        """
        if number != self.reports + 1:
            return Turn.STALE if number <= self.reports else Turn.GAP
        self.reports = number
        return Turn.NEXT


class Reported(msgspec.Struct, frozen=True):
    """Outcome of a report for the worker's requests."""

    begun: list[RequestId] = []
    """Requests whose first token this is: their prompts are computed."""
    finished: list[RequestId] = []
    acquitted: list[RequestId] = []
    """Suspects that have made enough tokens since the death of a worker."""
    gaps_s: dict[RequestId, float | None] = {}
    """Requests that resumed after a hand-over or a worker's death: seconds since their last output before, if any."""


class Reports:
    """The reports of the workers of these names.

    Calls `limit` with how many requests a worker may run at once so that its steps take at most `itl_target_s`; never
    if that is None.
    """

    def __init__(
        self,
        live: Mapping[RequestId, Live],
        ledger: Ledger,
        limit: Callable[[WorkerId, int], None],
        itl_target_s: float | None = None,
    ) -> None:
        self.workers: dict[WorkerId, WorkerFacts] = {}
        self.dropped_outputs = 0
        self._itl_target_s = itl_target_s
        self._indices: dict[WorkerId, int] = {}
        self._live = live
        self._ledger = ledger
        self._limit = limit
        self._geometry: KvGeometry | None = None

    def worker_ready(self, worker: WorkerId, ready: wire.WorkerReady) -> None:
        """Expect the worker's reports, from number 1."""
        geometry = self._geometry = ready.geometry
        pace = Pace(self._itl_target_s, ready.max_requests) if self._itl_target_s is not None else None
        index = self._indices.setdefault(worker, len(self._indices))
        self.workers[worker] = WorkerFacts(index, geometry, ready.max_requests, pace)
        self._ledger.open_worker(worker, geometry, ready.total_blocks)

    def worker_lost(self, worker: WorkerId) -> bool:
        """Forget a worker that has ended; return False if it never was ready."""
        self._ledger.close_worker(worker)
        return self.workers.pop(worker, None) is not None

    def kv_bytes(self, tokens: int) -> int:
        """Return the size of that many tokens, by the latest worker's geometry: they all run the same model."""
        return self._geometry.bytes_for_tokens(tokens) if self._geometry is not None else 0

    def take(self, worker: WorkerId, done: wire.StepDone, step: Step | None, now_s: float) -> Reported:
        """Apply the worker's next report; `step`: what the step made, if anything."""
        facts = self.workers[worker]
        if done.step_s:
            facts.step_s.append(done.step_s)
            facts.times.stepped(done.step_s, done.decodes, done.prompt_tokens)
        blocks = done.blocks
        sums = blocks.used_blocks, blocks.total_blocks, blocks.shared_blocks
        self._ledger.blocks_changed(worker, sums, blocks.changed, done.gone)  # type: ignore[arg-type]
        if facts.pace is not None and done.step_s:
            running = len(step.tokens) + len(step.outputs) if step is not None else 0
            self._judge(worker, facts.pace, facts.times.costs, done, running)
        reported = self._log(worker, done.leases, step, now_s) if step is not None else Reported()
        if done.step_s:
            kv_bytes = (blocks.used_blocks + blocks.shared_blocks) * facts.geometry.block_bytes
            costs = facts.times.costs if done.prompt_tokens and done.decodes else None  # a fit takes time
            facts.meter.stepped(done, kv_bytes, costs, len(reported.begun))
        return reported

    def take_paces(self) -> dict[WorkerId, WorkerPace]:
        """Return the workers' step times since the last call."""
        paces = {worker: facts.meter.take() for worker, facts in self.workers.items()}
        return {worker: pace for worker, pace in paces.items() if pace is not None}

    def owned(self, request: RequestId, worker: WorkerId) -> Live | None:
        """Return the request if the worker owns it."""
        live = self._live.get(request)
        return live if live is not None and live.worker == worker else None

    def take_grown(self) -> dict[RequestId, int]:
        """Return the sizes of the placed requests that have grown since the last call, on their owners alone.

        While a request moves, the ledger counts it on two workers, and a worker's last report may come after the
        request has left; the scheduler hears of the owner's blocks only.
        """
        grown = self._ledger.take_grown()
        return {request: kv_bytes for (request, worker), kv_bytes in grown.items() if self.owned(request, worker)}

    def needed_bytes(self, request: RequestId) -> int:
        """Return the size a waiting live request that holds nothing needs to resume on its worker."""
        live = self._live[request]
        return self.kv_bytes(live.prompt_tokens + len(live.output_token_ids) + 1)

    def take_preempted(self) -> list[RequestId]:
        """Return the placed requests that vLLM has preempted on their owners since the last call."""
        return [request for request, worker in self._ledger.take_emptied() if self.owned(request, worker)]

    def shared_bytes(self, worker: WorkerId) -> int:
        """Return a lower bound of the bytes that sharing saves among the worker's own requests."""
        return self._ledger.shared_bytes(worker, lambda request: self.owned(request, worker) is not None)

    def _judge(self, worker: WorkerId, pace: Pace, costs: StepCosts | None, done: wire.StepDone, running: int) -> None:
        """Limit the worker's steps: prompts get only the time that decodes leave of the target."""
        if costs is not None:
            self._limit(worker, pace.stepped(costs.step_s(done.decodes), running))
        elif not done.prompt_tokens:
            self._limit(worker, pace.stepped(done.step_s, running))

    def _log(self, worker: WorkerId, leases: Mapping[str, int], step: Step, now_s: float) -> Reported:
        """Log the tokens of requests that the worker owns; drop all others from the step."""
        reported, live_by, not_owned = Reported(), self._live, []
        for request, token_ids in step.tokens.items():
            live = live_by.get(request)
            if live is None or live.worker != worker or live.lease != leases.get(request, 0):
                not_owned.append(request)
            elif live.is_interrupted or live.deaths or live.harms or not live.output_token_ids:
                _log(live, token_ids, now_s, reported)
            else:
                live.last_output_s = now_s
                live.output_token_ids += token_ids
        for request in not_owned:
            del step.tokens[request]
        kept = []
        for output in step.outputs:
            live = live_by.get(output.request_id)
            if live is None or not live.is_of(worker, leases.get(output.request_id, 0)):
                continue
            kept.append(output)
            _log(live, output.new_token_ids, now_s, reported)
            if output.finish_reason is not None:
                reported.finished.append(live.request)
        self.dropped_outputs += len(not_owned) + len(step.outputs) - len(kept)
        step.outputs = kept
        self.workers[worker].tokens += sum(map(len, step.tokens.values())) + sum(len(one.new_token_ids) for one in kept)
        return reported


def _log(live: Live, token_ids: list[int], now_s: float, reported: Reported) -> None:
    """Log tokens, perhaps the first of all, or after an interruption."""
    if live.is_interrupted:
        live.is_interrupted = False
        reported.gaps_s[live.request] = now_s - live.last_output_s if live.last_output_s else None
    live.last_output_s = now_s
    if token_ids:
        if not live.output_token_ids:
            live.first_token_s = now_s
            reported.begun.append(live.request)
        if live.log(token_ids):
            reported.acquitted.append(live.request)
