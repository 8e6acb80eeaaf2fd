"""Detach running requests from a vLLM engine between two steps, and attach them to another.

The only code that detaches and attaches requests inside vLLM; it knows the pinned version (`engine/pin`), and its tests
say by name which assumption an upgrade breaks.  For the engine thread, between two steps, but for `prepare` and
`complete`.  Never moves bytes (`migrate/transports`), never talks to the daemon, never decides.

    source       freeze ──► stillness ──► snapshot ──► release      (its blocks stay until then)
                    └──────────────────────────────► thaw          (rolled back: it goes on here)

    destination  prepare ──► complete ──► reserve ──► grow ──► attach        (decodes on with the next step)
                                             └─────────────► cancel        (rolled back: its blocks are free)

Generated tokens stay output tokens.  A frozen request is on nobody's scheduler and emits nothing.  With async
scheduling a step of it may still be in flight when it is frozen; `stillness` says when that output is processed.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from melld.engine.pin import check_vllm_version
from melld.engine.worker.residency.arrival import Arrival, Arrivals, complete_arrival, prepare_arrival
from melld.engine.worker.residency.block_tables import BlockEpochs
from melld.engine.worker.residency.departure import Departures, Stillness
from melld.engine.worker.residency.rules import (
    adapter_refusal,
    engine_name,
    engine_refusal,
    kv_refusal,
    leave_refusal,
    request_refusal,
)
from melld.engine.worker.residency.runner import runner_of
from melld.engine.worker.residency.states import keeps_state
from melld.engine.worker.residency.warm import Warmers
from melld.migrate.snapshot import CopyPlan, MoveRefusal, MoveRefused, RequestFacts, Reservation, Via
from melld.scheduler.steptimes import StepTimes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

__all__ = ["Arrival", "Residency", "Stillness"]


class Residency:
    """The requests that leave one engine (`Departures`), and those that arrive on it (`Arrivals`, `Warmers`)."""

    def __init__(
        self, engine: "EngineCore", epochs: BlockEpochs, times: StepTimes, scratch: Sequence[int] = ()
    ) -> None:
        """Take an engine with its scheduler in this process, and its step times.

        `scratch`: blocks for trials of links; empty: free ones are borrowed.

        Raises:
            WrongEngineVersion: vLLM is not the version that this code knows.
        """
        check_vllm_version()
        self._engine = engine
        self._scheduler: Any = engine.scheduler
        self.name = engine_name(engine)
        runner = runner_of(engine)
        self._scratch = scratch
        self._epochs = epochs
        self._departures = leaving = Departures(self._scheduler, runner, self.name, epochs)
        self._arrivals = coming = Arrivals(engine, runner, self.name)
        self._warmers = warmers = Warmers(engine, times)
        self.stillness, self.snapshot = leaving.stillness, leaving.snapshot
        self.thaw, self.release = leaving.thaw, leaving.release
        self.warm, self.warm_on, self.take_warmed = warmers.begin, warmers.go_on, warmers.take
        self.prepare, self.complete = partial(prepare_arrival, engine), partial(complete_arrival, engine)
        self.grow, self.attach, self.cancel = coming.grow, coming.attach, coming.cancel
        self.copy_began, self.copy_ended = coming.copy_began, coming.copy_ended
        self.frozen: Collection[str] = leaving.frozen
        """Requests that are off their queue and still hold blocks."""
        self.expected: Collection[str] = coming.reserved
        """Requests with a reservation."""
        self.written: Collection[str] = coming.written
        """Requests that a copy writes for, those whose reservation is cancelled included."""

    # -- both sides -------------------------------------------------------------------------------------------------

    def facts(self, request_id: str) -> RequestFacts:
        """Return the request's progress, and which of its blocks can be copied while it decodes on.

        Raises:
            MoveRefused: it is not here.
        """
        request = self._scheduler.requests.get(request_id)
        if request is None:
            raise MoveRefused(request_id, MoveRefusal.UNKNOWN)
        manager = self._scheduler.kv_cache_manager
        # vLLM counts the tokens of a step in flight as computed.
        computed = max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
        held = zip(manager.coordinator.single_type_managers, manager.get_block_ids(request_id), strict=True)
        if any(request_id in _begun_by(step) for step in self._steps_in_flight):
            computed = 0  # what it found in the prefix cache may be another's that is computed in that very step
        return RequestFacts(
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=computed,
            full_block_ids=tuple(
                () if keeps_state(group) else tuple(ids[: computed // group.block_size]) for group, ids in held
            ),
            block_epoch=self._epochs.of(request),
            in_prompt=not request.num_output_tokens and request.num_computed_tokens < request.num_prompt_tokens,
        )

    def refusal(self, request_id: str, via: Via) -> MoveRefusal | None:
        """Return why the request cannot leave this way, or None.  Changes nothing."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return MoveRefusal.UNKNOWN
        if request_id in self.frozen:
            return MoveRefusal.ALREADY_LEAVING
        kv = kv_refusal(self._scheduler) if via is Via.KV else None
        return leave_refusal(self._scheduler) or kv or request_refusal(request, via)

    def is_in_flight(self, request_id: str) -> bool:
        """Return True while a step computes for a request of that id, even if that request has left since."""
        return any(request_id in step.num_scheduled_tokens for step in self._steps_in_flight)

    def admit(self, request: "Request") -> None:
        """Give a new request to the scheduler.

        Raises:
            MoveRefused: its adapter cannot be loaded.
        """
        if reason := adapter_refusal(self._engine, request):
            raise MoveRefused(request.request_id, reason)
        self._engine.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort these requests: running, frozen, or only expected.  Ignore unknown ids."""
        elsewhere = []
        for request_id in request_ids:
            self._warmers.cancel(request_id)
            if request_id in self.frozen:
                self._departures.release(request_id)
            elif request_id in self.expected:
                self._arrivals.cancel(request_id)
            else:
                elsewhere.append(request_id)
        if elsewhere:
            self._engine.abort_requests(elsewhere)

    def plan(self, request_id: str) -> CopyPlan | None:
        """Return which blocks of an expected request have been copied; None if it is not expected."""
        arrival = self._arrivals.reserved.get(request_id)
        return arrival.plan if arrival is not None else None

    def uncache(self, request_id: str) -> None:
        """Remove the request's blocks from the prefix cache: their content is in doubt."""
        manager = self._scheduler.kv_cache_manager
        manager.evict_blocks({block for group in manager.get_block_ids(request_id) for block in group})

    # -- the source -------------------------------------------------------------------------------------------------

    def freeze(self, request_id: str, via: Via) -> Stillness:
        """Take the request off its queue.  It keeps its blocks; later steps emit nothing for it.

        Raises:
            MoveRefused: it cannot leave this way; it continues.
        """
        if reason := self.refusal(request_id, via):
            raise MoveRefused(request_id, reason)
        self._departures.freeze(self._scheduler.requests[request_id])
        return self._departures.stillness(request_id)

    # -- the destination --------------------------------------------------------------------------------------------

    def reserve(self, arrival: Arrival, token_capacity: int, computed_tokens: int = 0) -> Reservation:
        """Reserve blocks for an arriving request, whose first tokens' KV will be copied.

        Raises:
            NoRoom: too few free blocks, or no slot in the batch.
            MoveRefused: this engine cannot take it.
        """
        self._admissible(arrival)
        return self._arrivals.reserve(arrival, token_capacity, computed_tokens)

    def attach_unreserved(self, arrival: Arrival) -> None:
        """Let the request continue here from its tokens, once the scheduler has room for it.

        Raises:
            MoveRefused: this engine cannot take it.
        """
        self._admissible(arrival)
        self._arrivals.attach_unreserved(arrival)

    def borrow_scratch(self, blocks: int) -> list[int]:
        """Take free blocks for the trial of a link (`transports.choose.open_best`), fewer if fewer are free."""
        if self._scratch:
            return list(self._scratch[:blocks])
        pool = self._scheduler.kv_cache_manager.block_pool
        return [block.block_id for block in pool.get_new_blocks(min(blocks, pool.get_num_free_blocks()))]

    def return_scratch(self, block_ids: list[int]) -> None:
        """Free those blocks without caching their content."""
        if self._scratch:
            return
        pool = self._scheduler.kv_cache_manager.block_pool
        pool.free_blocks([pool.blocks[block_id] for block_id in block_ids])

    # ---------------------------------------------------------------------------------------------------------------

    @property
    def _steps_in_flight(self) -> list["SchedulerOutput"]:
        return [step for _, step, _ in self._engine.batch_queue or ()]

    def _admissible(self, arrival: Arrival) -> None:
        request_id = arrival.request_id
        here = request_id in self._scheduler.requests
        coming = request_id in self.expected or request_id in self.written  # into blocks that are given up, too
        if here or coming or request_id in self.frozen or self.is_in_flight(request_id):
            raise MoveRefused(request_id, MoveRefusal.ALREADY_THERE)
        if reason := engine_refusal(self._scheduler) or adapter_refusal(self._engine, arrival.request):
            raise MoveRefused(request_id, reason)


def _begun_by(step: "SchedulerOutput") -> set[str]:
    """Return the requests that were not running before the step."""
    return {new.req_id for new in step.scheduled_new_reqs}.union(step.scheduled_cached_reqs.resumed_req_ids)
