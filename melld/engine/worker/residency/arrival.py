"""The destination's half of residency: reserve blocks for a request, rebuild its state, and let it decode on.

Owns reservations and the requests built for them.  Never copies bytes; never evicts a running request to make room.

A reservation holds real blocks: those in this worker's prefix cache, which need no copy, and fresh ones.  A move by
tokens reserves the same, and computes what is not cached.  `prepare` and `complete` are thread-safe and slow (block
hashes, grammar); the rest is quick and for the engine thread.
"""

import copy
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.worker.residency.arriving_tables import ArrivingTables
from melld.engine.worker.residency.runner import Runner
from melld.migrate.snapshot import CopyPlan, MoveRefusal, MoveRefused, NoRoom, RequestSnapshot, Reservation, Via

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request


class Arrival(msgspec.Struct):
    """A request built for this engine that its scheduler does not know yet."""

    request: Any
    plan: CopyPlan | None = None
    """Which of its blocks have been copied, once room is reserved for them."""
    reused_tokens: int = 0
    computed_tokens: int = 0
    """Those that need no room behind a window: reused here, or computed on the source when room was made."""
    token_capacity: int = 0

    @property
    def request_id(self) -> str:
        """Return vLLM's id of the request."""
        return str(self.request.request_id)

    @property
    def compiling(self) -> "Future[Any] | None":
        """Return its unfinished grammar compilation, if any."""
        structured = self.request.structured_output_request
        pending = structured._grammar if structured is not None else None  # noqa: SLF001  its public face hides it
        return pending if isinstance(pending, Future) and not pending.done() else None


def prepare_arrival(engine: "EngineCore", core_request: bytes) -> Arrival:
    """Build the request and start compiling its grammar.  Touches no scheduler, so any thread may call it."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder

    request, _ = engine.preprocess_add_request(MsgpackDecoder(EngineCoreRequest).decode(core_request))
    return Arrival(request)


def complete_arrival(engine: "EngineCore", arrival: Arrival, output_token_ids: list[int]) -> Arrival:
    """Give the request its tokens so far, replaying them in its compiled grammar.  For any thread.

    Raises:
        MoveRefused: the grammar cannot be built here, or does not accept the tokens.
    """
    structured = arrival.request.structured_output_request
    if (compiling := arrival.compiling) is not None:
        compiling.exception()
    if structured is not None and (structured.grammar is None or isinstance(structured.grammar, Exception)):
        raise MoveRefused(arrival.request_id, MoveRefusal.GRAMMAR)
    append_tokens(engine, arrival, output_token_ids)
    return arrival


def append_tokens(engine: "EngineCore", arrival: Arrival, output_token_ids: list[int]) -> None:
    """Extend the request to these output tokens, of which it may already have some.

    Raises:
        MoveRefused: they do not continue the request's tokens, or its grammar does not accept them.
    """
    request = arrival.request
    known = len(request.output_token_ids)
    if list(request.output_token_ids) != output_token_ids[:known]:
        raise MoveRefused(arrival.request_id, MoveRefusal.INCOMPATIBLE)
    missing = output_token_ids[known:]
    if not request.use_structured_output:
        request.append_output_token_ids(missing)
        return
    for token in missing:  # one at a time, as generated: the end of reasoning is detected from the token's context
        request.append_output_token_ids(token)
        if not engine.structured_output_manager.accept_tokens(request, [token]):
            raise MoveRefused(arrival.request_id, MoveRefusal.GRAMMAR)


class Arrivals:
    """The reservations of one engine."""

    def __init__(self, engine: "EngineCore", runner: Runner, engine_name: str) -> None:
        self._engine = engine
        self._scheduler: Any = engine.scheduler
        self._runner = runner
        self._name = engine_name
        self._tables = ArrivingTables(self._scheduler)
        self.reserved: dict[str, Arrival] = {}
        self.written: set[str] = set()
        """Requests whose reserved blocks another thread writes into."""
        self._given_up: dict[str, Arrival] = {}

    @property
    def free_slots(self) -> int:
        """Return the slots of the running batch that are neither used nor reserved."""
        scheduler = self._scheduler
        expected = len(self.reserved) + len(self._given_up)
        taken = len(scheduler.running) + len(scheduler.kv_holding_waiting) + expected
        return int(scheduler.max_num_active_reqs) - taken

    def reserve(self, arrival: Arrival, token_capacity: int, computed_tokens: int) -> Reservation:
        """Reserve blocks for `token_capacity` tokens, and at least for the request's tokens.

        Of the `computed_tokens`, whose blocks will be copied, those behind a sliding window get none.

        Raises:
            NoRoom: too few free blocks, or no slot in the batch; nothing is reserved.
        """
        request = arrival.request
        capacity = self._within_model(max(token_capacity, request.num_tokens))
        if self.free_slots < 1:
            raise self._no_room(arrival, capacity)
        reused_tokens = self._tables.take(request, capacity, computed_tokens)
        if reused_tokens is None:
            raise self._no_room(arrival, capacity)
        arrival.reused_tokens, arrival.token_capacity = reused_tokens, capacity
        arrival.computed_tokens = max(reused_tokens, computed_tokens)
        self.reserved[arrival.request_id] = arrival
        reservation = self._reservation(arrival)
        arrival.plan = CopyPlan(reservation)
        return reservation

    def grow(self, request_id: str, token_capacity: int) -> Reservation:
        """Grow the reservation to `token_capacity` tokens in total.

        Raises:
            NoRoom: too few free blocks; the reservation stays as it was.
        """
        arrival = self.reserved[request_id]
        capacity = self._within_model(token_capacity)
        if capacity > arrival.token_capacity:
            if not self._tables.grow(arrival.request, capacity):
                raise self._no_room(arrival, capacity)
            arrival.token_capacity = capacity
        return self._reservation(arrival)

    def attach(self, snapshot: RequestSnapshot, via: Via) -> None:
        """Let the request decode on from its snapshot, in its reserved blocks.

        `Via.KV`: every block of the snapshot that was not reused here holds the source's bytes.  `Via.TOKENS`: what was
        not reused is computed again.

        Raises:
            MoveRefused: the snapshot is of another model, does not continue the request, or needs blocks behind a
                window for which no room was made.
            NoRoom: it has outgrown the reservation.  In both cases the reservation stands; cancel it.
        """
        arrival = self.reserved.get(snapshot.request)
        if arrival is None:
            raise MoveRefused(snapshot.request, MoveRefusal.UNKNOWN)
        assert snapshot.request not in self.written, f"{snapshot.request} is still being copied"
        if snapshot.engine != self._name:
            raise MoveRefused(snapshot.request, MoveRefusal.INCOMPATIBLE)
        valid = max(arrival.reused_tokens, snapshot.num_computed_tokens if via is Via.KV else 0)
        if valid < arrival.computed_tokens and self._tables.forgets:
            raise MoveRefused(snapshot.request, MoveRefusal.PREEMPTED)
        self.grow(snapshot.request, snapshot.num_tokens)
        append_tokens(self._engine, arrival, snapshot.output_token_ids)
        del self.reserved[snapshot.request]
        request = arrival.request
        request.num_computed_tokens = valid
        self._tables.settle(request, is_copied=valid > arrival.reused_tokens)
        # The request has its blocks already; a look into the prefix cache would find them a second time.
        request.skip_reading_prefix_cache |= valid == 0
        _restore(request, snapshot, valid)
        self._enter(request, snapshot.generator_state)

    def attach_unreserved(self, arrival: Arrival) -> None:
        """Queue the request with only its tokens and no reservation, until the scheduler has room."""
        request = arrival.request
        _ask_no_prompt_logprobs_again(request)
        if request.num_output_tokens:
            request.prefill_stats = None  # sent with the first token
        self._enter(request, None)

    def copy_began(self, request_id: str) -> None:
        """Record that another thread writes into the reserved blocks from now on."""
        self.written.add(request_id)

    def copy_ended(self, request_id: str) -> None:
        """Record that the other thread has stopped, and free the blocks if the reservation has since been cancelled."""
        self.written.discard(request_id)
        if arrival := self._given_up.pop(request_id, None):
            self._tables.free(arrival.request)

    def cancel(self, request_id: str) -> None:
        """Free the reserved blocks as soon as no copy writes into them."""
        arrival = self.reserved.pop(request_id)
        if request_id in self.written:
            self._given_up[request_id] = arrival
        else:
            self._tables.free(arrival.request)

    def _within_model(self, tokens: int) -> int:
        return min(tokens, int(self._scheduler.max_model_len))

    def _enter(self, request: "Request", generator_state: bytes | None) -> None:
        """Add the request to the scheduler, and give the runner what the scheduler will not."""
        from vllm.v1.request import RequestStatus

        scheduler, request_id = self._scheduler, request.request_id
        if request.num_output_tokens or generator_state is not None:
            request.status = RequestStatus.PREEMPTED
            blocks = scheduler.kv_cache_manager.get_block_ids(request_id)
            self._runner.admit(request, blocks, generator_state)
        # The request may have been here before, and have left since the last step.
        scheduler.finished_req_ids.discard(request_id)
        scheduler.prev_step_scheduled_req_ids.discard(request_id)
        scheduler.requests[request_id] = request
        if request.num_output_tokens and not scheduler._holds_kv_blocks(request):  # noqa: SLF001
            scheduler.waiting.prepend_request(request)  # was running: goes ahead of requests that never have
        else:
            scheduler._enqueue_waiting_request(request)  # noqa: SLF001

    def _reservation(self, arrival: Arrival) -> Reservation:
        return self._tables.reservation(arrival.request_id, arrival.reused_tokens)

    def _no_room(self, arrival: Arrival, tokens: int) -> NoRoom:
        needed = self._tables.blocks_for_tokens(tokens)
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return NoRoom(arrival.request_id, needed, free, self.free_slots)


def _ask_no_prompt_logprobs_again(request: "Request") -> None:
    """Drop the prompt logprobs sent with the first token: the V2 runner would collect them again."""
    params = request.sampling_params
    if params is not None and params.prompt_logprobs is not None and request.num_output_tokens:
        request.sampling_params = copy.copy(params)
        request.sampling_params.prompt_logprobs = None


def _restore(request: "Request", snapshot: RequestSnapshot, valid_tokens: int) -> None:
    """Carry over what the client must get exactly once, and the request's current urgency."""
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType
    from vllm.v1.metrics.stats import PrefillStats

    _ask_no_prompt_logprobs_again(request)
    request.events = [EngineCoreEvent(EngineCoreEventType(kind), at) for kind, at in snapshot.events]
    request.num_preemptions, request.priority = snapshot.num_preemptions, snapshot.priority
    if snapshot.prefill_stats is None:
        request.prefill_stats = None
    elif any(snapshot.prefill_stats):  # a prefill has begun: keep its count of cached tokens
        request.prefill_stats = PrefillStats(*snapshot.prefill_stats)
        if valid_tokens == 0:
            request.num_preemptions += 1  # the scheduler leaves the statistics of a repeated prefill alone
    elif valid_tokens:
        request.prefill_stats.set(request.num_prompt_tokens, valid_tokens, 0)
