"""The source's half of residency: a request is taken off its scheduler, written down, and given up or put back.

Owns frozen requests: each holds its blocks until `release` or `thaw`.  Never allocates.

    on a queue ── freeze ──► frozen ──(last output processed)──► settled ── release ──► gone
         ▲                     └──(it ended in that very step)──► ended ────────────────► gone
         └────────────────────────────── thaw ───────────────────────┘ (settled)
"""

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.worker.residency.runner import Runner
from melld.migrate.snapshot import MoveRefused, Refusal, RequestSnapshot

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class Stillness(enum.StrEnum):
    """How far a frozen request has come to rest."""

    IN_FLIGHT = "in flight"  # a step that was under way still computes for it
    SETTLED = "settled"  # nothing more will be emitted for it here
    ENDED = "ended"  # that step's output was its last: it has finished here, in the ordinary way


class _Departure(msgspec.Struct):
    """One frozen request, and where on its queue it stood."""

    request: Any
    place: int | None
    settled: bool = False


class Departures:
    """The frozen requests of one engine."""

    def __init__(self, scheduler: "Scheduler", runner: Runner, engine: str) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._engine = engine
        self._frozen: dict[str, _Departure] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._frozen

    def __iter__(self) -> Any:
        return iter(tuple(self._frozen))

    def freeze(self, request: "Request") -> None:
        """Take the request off its queue.  It keeps its blocks; no step that begins from now on computes for it."""
        scheduler, request_id = self._scheduler, request.request_id
        self._frozen[request_id] = _Departure(request, _take_off(scheduler, request))
        scheduler._inflight_prefills.discard(request)  # noqa: SLF001
        # As the scheduler itself does where it forces a request to resume (Scheduler.reset_prefix_cache): should the
        # request come back before the next step, the runner must be sent its tokens.
        scheduler.prev_step_scheduled_req_ids.discard(request_id)
        if self._runner.holds_slot_while_away:
            scheduler.reset_preempted_req_ids.add(request_id)

    def stillness(self, request_id: str) -> Stillness:
        """Whether the frozen request has come to rest.  Ask after each step until it has; an ended one is forgotten."""
        departure = self._frozen[request_id]
        if departure.settled:
            return Stillness.SETTLED
        request = departure.request
        if self._scheduler.requests.get(request_id) is not request or request.is_finished():
            del self._frozen[request_id]
            return Stillness.ENDED
        if request.num_in_flight_tokens:
            return Stillness.IN_FLIGHT
        # From here on the scheduler does not know it: an abort or a stray output finds nothing.
        del self._scheduler.requests[request_id]
        departure.settled = True
        return Stillness.SETTLED

    def snapshot(self, request_id: str) -> RequestSnapshot:
        """The settled request, whole."""
        request = self._settled(request_id).request
        manager = self._scheduler.kv_cache_manager
        computed = request.num_computed_tokens
        blocks = manager.get_block_ids_for_computed_tokens(request_id, computed)
        stats = request.prefill_stats
        return RequestSnapshot(
            request=request_id,
            core_request=encode_core_request(request),
            output_token_ids=list(request.output_token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=computed,
            block_ids=tuple(tuple(group) for group in blocks),
            block_epoch=request.num_preemptions,
            num_preemptions=request.num_preemptions,
            generator_state=self._runner.generator_state(request_id),
            prefill_stats=None if stats is None else tuple(getattr(stats, name) for name in PREFILL_STATS),
            events=tuple((int(event.type), event.timestamp) for event in request.events),
            engine=self._engine,
        )

    def thaw(self, request_id: str) -> None:
        """Put the settled request back: it goes on with the next step that has a place for it, its KV in hand."""
        from vllm.v1.request import RequestStatus

        departure = self._settled(request_id)
        request, scheduler = departure.request, self._scheduler
        del self._frozen[request_id]
        scheduler.requests[request_id] = request
        if request.status == RequestStatus.RUNNING:
            # Its place may be another's now.  A preempted request that holds KV is the first to get one.
            request.status = RequestStatus.PREEMPTED
        if request.num_computed_tokens or departure.place is None:
            scheduler._enqueue_waiting_request(request)  # noqa: SLF001
        else:
            _put_back(scheduler, request, departure.place)

    def release(self, request_id: str) -> None:
        """Give the request up, settled or not: free its blocks and what the runner keeps.  The client hears nothing."""
        departure = self._frozen.pop(request_id)
        self._scheduler.requests.pop(request_id, None)
        self._scheduler.encoder_cache_manager.free(departure.request)
        self._scheduler._free_request_blocks(departure.request)  # noqa: SLF001  late, if a step still writes to them
        self._scheduler.finished_req_ids.add(request_id)

    def _settled(self, request_id: str) -> _Departure:
        departure = self._frozen.get(request_id)
        if departure is None:
            raise MoveRefused(request_id, Refusal.UNKNOWN)
        assert departure.settled, f"{request_id} is still in flight"
        return departure


PREFILL_STATS = (
    "num_prompt_tokens",
    "num_computed_tokens",
    "num_cached_tokens",
    "num_local_cached_tokens",
    "num_external_cached_tokens",
    "num_cache_creation_tokens",
)
"""vllm.v1.metrics.stats.PrefillStats, in this order in a snapshot."""


def encode_core_request(request: "Request") -> bytes:
    """The request as it once entered a scheduler, in vLLM's own encoding (vllm.v1.serial_utils), without its images.

    The destination has those from the daemon, with which it took room for the request.
    """
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    structured = request.structured_output_request
    core_request = EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=None,
        sampling_params=request.sampling_params,
        pooling_params=None,
        arrival_time=request.arrival_time,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        data_parallel_rank=None,
        client_index=request.client_index,
        priority=request.priority,
        trace_headers=request.trace_headers,
        reasoning_ended=_reasoning_ended_at_start(request),
        reasoning_parser_kwargs=structured.reasoning_parser_kwargs if structured is not None else None,
        session_id=request.session_id,
        kv_hints=request.kv_hints,
    )
    buffers = MsgpackEncoder().encode(core_request)
    assert len(buffers) == 1, "a request without tensors is one buffer"
    return bytes(buffers[0])


def _reasoning_ended_at_start(request: "Request") -> bool | None:
    """What the request came with, as far as it is known: once output has been made, the end may have come with that.

    None has the destination look for the end in the prompt, as vLLM does.
    """
    structured = request.structured_output_request
    if structured is None or (structured.reasoning_ended and request.num_output_tokens):
        return None
    return bool(structured.reasoning_ended) if structured.reasoning_ended is not None else None


def _take_off(scheduler: "Scheduler", request: "Request") -> int | None:
    """Remove the request from the queue that it is on; its place there, where the queue is a line (FCFS)."""
    from vllm.v1.request import RequestStatus

    if request.status == RequestStatus.RUNNING:
        scheduler.running.remove(request)
        return None
    holding = any(waiting is request for waiting in scheduler.kv_holding_waiting)
    line = scheduler.kv_holding_waiting if holding else scheduler.waiting
    place = next((place for place, waiting in enumerate(line) if waiting is request), None)
    line.remove_request(request)
    scheduler.deferred_waiting.discard(request)
    return None if holding else place


def _put_back(scheduler: "Scheduler", request: "Request", place: int) -> None:
    """Return a request that holds nothing to its place in the line."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    line = scheduler.waiting
    if isinstance(line, FCFSRequestQueue):
        line.insert(min(place, len(line)), request)
        if scheduler._is_blocked_waiting_status(request.status):  # noqa: SLF001
            scheduler.deferred_waiting.add(request)
    else:
        scheduler._enqueue_waiting_request(request)  # noqa: SLF001
