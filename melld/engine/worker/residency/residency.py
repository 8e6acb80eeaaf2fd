"""Requests taken out of a vLLM worker between two steps, and put into another as if they had always been there.

The only code that detaches and attaches requests inside vLLM; it knows the pinned version (`engine/pin`), and its tests
say by name which assumption an upgrade breaks.  For the engine thread, between two steps, but for `prepare`.
Never moves bytes (`migrate/transports`), never talks to the daemon, never decides.

    source       freeze ──► stillness ──► snapshot ──► release      (its blocks stay until then)
                    └──────────────────────────────► thaw          (rolled back: it goes on here)

    destination  prepare ──► reserve ──► grow ──► attach            (decodes on with the next step)
                                └──────────────► cancel            (rolled back: its blocks are free)

Generated tokens stay output tokens.  A frozen request is on nobody's scheduler and emits nothing.  With async
scheduling a step of it may still be in flight when it is frozen; `stillness` says when that output is processed.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from melld.engine.pin import check_vllm_version
from melld.engine.worker.residency.arrival import Arrival, Arrivals, prepare_arrival
from melld.engine.worker.residency.block_tables import phase_of
from melld.engine.worker.residency.departure import Departures, Stillness
from melld.engine.worker.residency.rules import (
    check_engine,
    engine_name,
    engine_refusal,
    kv_refusal,
    lora_refusal,
    request_refusal,
)
from melld.engine.worker.residency.runner import runner_of
from melld.engine.worker.residency.warm import Warmers
from melld.migrate.snapshot import MoveRefused, Refusal, RequestFacts, RequestSnapshot, Reservation, Via

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

__all__ = ["Arrival", "Residency", "Stillness"]


class Residency:
    """Who lives on one engine: the requests that leave, and those that arrive."""

    def __init__(self, engine: "EngineCore", block_bytes: int) -> None:
        """For an engine of this process (uniproc executor, one device).  `block_bytes`: one block of all layers.

        Raises:
            WrongEngineVersion: vLLM is not the version that this code knows.
            UnsupportedEngine: requests cannot be taken out of this engine.
        """
        check_vllm_version()
        check_engine(engine)
        self._engine = engine
        self._scheduler: Any = engine.scheduler
        self._block_bytes = block_bytes
        self.name = engine_name(engine)
        # With steps in flight, one of them may still write to a block that an ended request has given back.  Vital
        # here, as to vLLM's KV connectors: blocks that are reserved are written to from outside of its stream.
        self._scheduler.defer_block_free |= engine.vllm_config.max_concurrent_batches > 1
        runner = runner_of(engine)
        self._departures = Departures(self._scheduler, runner, self.name)
        self._arrivals = Arrivals(engine, runner, self.name)
        self._warmers = Warmers(engine)

    # -- both sides -------------------------------------------------------------------------------------------------

    def facts(self, request_id: str) -> RequestFacts:
        """Where the request stands, and which of its blocks can be copied while it decodes on.

        Raises:
            MoveRefused: it is not here.
        """
        request = self._known(request_id)
        manager = self._scheduler.kv_cache_manager
        # Tokens of a step in flight are counted as computed before they are.
        computed = max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
        held = manager.get_block_ids(request_id)
        full = computed // self._scheduler.block_size
        blocks = sum(len(group) for group in held)
        return RequestFacts(
            request=request_id,
            phase=phase_of(request),
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=computed,
            full_block_ids=tuple(tuple(group[:full]) for group in held),
            block_epoch=request.num_preemptions,
            blocks=blocks,
            kv_bytes=blocks * self._block_bytes,
        )

    def refusal(self, request_id: str, via: Via) -> Refusal | None:
        """Why the request cannot leave this way, or None.  Nothing is touched."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return Refusal.UNKNOWN
        if request_id in self._departures:
            return Refusal.ALREADY_LEAVING
        kv = kv_refusal(self._scheduler) if via is Via.KV else None
        return engine_refusal(self._scheduler) or kv or request_refusal(request, via)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests wherever they stand: running, frozen, or only expected.  Unknown ids are ignored."""
        elsewhere = []
        for request_id in request_ids:
            self._warmers.cancel(request_id)
            if request_id in self._departures:
                self._departures.release(request_id)
            elif request_id in self._arrivals:
                self._arrivals.cancel(request_id)
            else:
                elsewhere.append(request_id)
        if elsewhere:
            self._engine.abort_requests(elsewhere)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Requests that are on their way out and still hold blocks."""
        return tuple(self._departures)

    @property
    def expected(self) -> tuple[str, ...]:
        """Requests that room is kept for."""
        return tuple(self._arrivals)

    @property
    def has_steps_in_flight(self) -> bool:
        """Whether the engine must be stepped though its scheduler is idle, for a frozen request to settle."""
        return bool(self._engine.batch_queue)

    # -- the source -------------------------------------------------------------------------------------------------

    def freeze(self, request_id: str, via: Via) -> Stillness:
        """Take the request off its queue, its blocks still its own; it emits nothing from a step that begins now.

        Raises:
            MoveRefused: it cannot leave this way; it runs on.
        """
        if reason := self.refusal(request_id, via):
            raise MoveRefused(request_id, reason)
        self._departures.freeze(self._scheduler.requests[request_id])
        return self._departures.stillness(request_id)

    def stillness(self, request_id: str) -> Stillness:
        """Whether the frozen request has come to rest; ask after each step.  One that has ended is frozen no more."""
        return self._departures.stillness(request_id)

    def snapshot(self, request_id: str) -> RequestSnapshot:
        """The settled request, whole."""
        return self._departures.snapshot(request_id)

    def thaw(self, request_id: str) -> None:
        """Put the settled request back: the move is off."""
        self._departures.thaw(request_id)

    def release(self, request_id: str) -> None:
        """Forget the frozen request and free its blocks: the destination has it.  No output is made for it."""
        self._departures.release(request_id)

    # -- the destination --------------------------------------------------------------------------------------------

    def warm(self, core_request: bytes, output_token_ids: list[int], tokens_per_s: float = 0.0) -> bool:
        """Begin to compute a request's blocks ahead of a move by tokens, in chunks, while it decodes at its source.

        `tokens_per_s`: no faster than so while others run here; 0: no limit.  False where there is nothing to be
        gained: reserve at once.
        """
        return self._warmers.begin(core_request, output_token_ids, tokens_per_s)

    def warm_on(self) -> None:
        """Before each step, and before the engine rests: go on with what `warm` has begun."""
        self._warmers.go_on()

    def take_warmed(self, outputs: "EngineCoreOutputs | None") -> list[str]:
        """After each step: remove what `warm` put into its outputs; the requests that are to be reserved for now."""
        return self._warmers.take(outputs)

    def cancel_warm(self, request_id: str) -> None:
        """Stop computing ahead for this request."""
        self._warmers.cancel(request_id)

    def prepare(self, core_request: bytes, output_token_ids: list[int]) -> Arrival:
        """Build a request for `reserve`: slow (hashes, grammar), and the one thing here that any thread may do.

        Raises:
            MoveRefused: its grammar cannot be built here.
        """
        return prepare_arrival(self._engine, core_request, output_token_ids)

    def reserve(self, arrival: Arrival, token_capacity: int) -> Reservation:
        """Take room for a request that is to come.

        Raises:
            NoRoom: too few free blocks, or no place in the batch.
            MoveRefused: this engine cannot take it.
        """
        self._admissible(arrival)
        return self._arrivals.reserve(arrival, token_capacity)

    def grow(self, request_id: str, token_capacity: int) -> Reservation:
        """Take more room for it, as it grows at the source.

        Raises:
            NoRoom: too few free blocks; what is reserved stays so.
        """
        return self._arrivals.grow(request_id, token_capacity)

    def attach(self, snapshot: RequestSnapshot, via: Via) -> None:
        """Let the request go on here, in its reserved room; with `Via.KV`, its blocks' bytes have been copied.

        Raises:
            MoveRefused: the snapshot does not fit the reservation or this engine.
            NoRoom: it has outgrown its room.  In both cases the reservation stands: `cancel` it.
        """
        self._arrivals.attach(snapshot, via)

    def attach_unreserved(self, arrival: Arrival, snapshot: RequestSnapshot) -> None:
        """Let the request go on here by its tokens, when the scheduler finds room for it.

        Raises:
            MoveRefused: this engine cannot take it.
        """
        self._admissible(arrival)
        self._arrivals.attach_unreserved(arrival, snapshot)

    def copy_began(self, request_id: str) -> None:
        """Another thread is about to write into the reserved blocks: they stay taken until `copy_ended`."""
        self._arrivals.copy_began(request_id)

    def copy_ended(self, request_id: str) -> None:
        """That thread has done with them, well or not.  To be said once for each `copy_began`."""
        self._arrivals.copy_ended(request_id)

    def cancel(self, request_id: str) -> None:
        """Give a reservation's room back, as soon as no copy writes into it."""
        self._arrivals.cancel(request_id)

    def borrow_scratch(self, blocks: int) -> list[int]:
        """Free blocks for the trial of a link (`transports.choose.open_best`), fewer if there are not so many."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return [block.block_id for block in pool.get_new_blocks(min(blocks, pool.get_num_free_blocks()))]

    def return_scratch(self, block_ids: list[int]) -> None:
        """Give those blocks back; what they held is no use to anybody."""
        pool = self._scheduler.kv_cache_manager.block_pool
        pool.free_blocks([pool.blocks[block_id] for block_id in block_ids])

    # ---------------------------------------------------------------------------------------------------------------

    def _known(self, request_id: str) -> "Request":
        request = self._scheduler.requests.get(request_id)
        if request is None:
            raise MoveRefused(request_id, Refusal.UNKNOWN)
        return request

    def _admissible(self, arrival: Arrival) -> None:
        request_id = arrival.request_id
        here = request_id in self._scheduler.requests
        expected = request_id in self._arrivals or self._arrivals.lingers(request_id)
        if here or expected or request_id in self._departures:
            raise MoveRefused(request_id, Refusal.ALREADY_THERE)
        if reason := engine_refusal(self._scheduler) or lora_refusal(self._engine, arrival.request):
            raise MoveRefused(request_id, reason)
