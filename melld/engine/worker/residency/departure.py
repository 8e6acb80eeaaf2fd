"""The source's half of residency: freeze a request, snapshot it, and release or thaw it.

Owns frozen requests: each holds its blocks until `release` or `thaw`.  Never allocates.

    on a queue ── freeze ──► frozen ──(last output processed)──► settled ── release ──► gone
         ▲                     └──(it ended in that very step)──► ended ────────────────► gone
         └────────────────────────────── thaw ───────────────────────┘ (settled)
"""

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

import msgspec

from melld.engine.worker.residency.block_tables import BlockEpochs
from melld.engine.worker.residency.runner import Runner
from melld.engine.worker.residency.states import can_copy_states, keeps_state, state_of
from melld.migrate.snapshot import MoveRefusal, MoveRefused, RequestSnapshot

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class Stillness(enum.StrEnum):
    """The state of a frozen request."""

    IN_FLIGHT = "in flight"  # a step that was under way still computes for it
    SETTLED = "settled"  # this worker emits nothing more for it
    ENDED = "ended"  # that step's output was its last: the request has finished here


class _Departure(msgspec.Struct):
    """A frozen request, and its former place in its queue."""

    request: Any
    place: int | None
    settled: bool = False


class Departures:
    """The frozen requests of one engine."""

    def __init__(self, scheduler: "Scheduler", runner: Runner, engine: str, epochs: BlockEpochs) -> None:
        self._scheduler = scheduler
        self._epochs = epochs
        self._runner = runner
        self._engine = engine
        self.frozen: dict[str, _Departure] = {}

    def freeze(self, request: "Request") -> None:
        """Take the request off its queue.  It keeps its blocks; later steps compute nothing for it."""
        scheduler, request_id = self._scheduler, request.request_id
        self.frozen[request_id] = _Departure(request, _take_off(scheduler, request))
        scheduler._inflight_prefills.discard(request)  # noqa: SLF001
        request.spec_token_ids = []  # as when it is preempted: others are drafted where it goes on
        # As in Scheduler.reset_prefix_cache, where vLLM forces a request to resume: if the request comes back before
        # the next step, the runner must get its tokens.
        scheduler.prev_step_scheduled_req_ids.discard(request_id)
        if self._runner.holds_slot_while_away:
            scheduler.reset_preempted_req_ids.add(request_id)

    def stillness(self, request_id: str) -> Stillness:
        """Return the frozen request's state; ask after each step until it has settled.  Forgets an ended request."""
        departure = self.frozen[request_id]
        if departure.settled:
            return Stillness.SETTLED
        request = departure.request
        if self._scheduler.requests.get(request_id) is not request or request.is_finished():
            del self.frozen[request_id]
            return Stillness.ENDED
        if request.num_in_flight_tokens:
            return Stillness.IN_FLIGHT
        # The scheduler forgets it now: an abort or a stray output finds nothing.
        del self._scheduler.requests[request_id]
        departure.settled = True
        return Stillness.SETTLED

    def snapshot(self, request_id: str) -> RequestSnapshot:
        """Return the complete state of the settled request."""
        request = self._settled(request_id).request
        manager = self._scheduler.kv_cache_manager
        computed = request.num_computed_tokens
        blocks = manager.get_block_ids_for_computed_tokens(request_id, computed)
        groups = zip(manager.coordinator.single_type_managers, blocks, strict=True)
        stats = request.prefill_stats
        return RequestSnapshot(
            request=request_id,
            output_token_ids=list(request.output_token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=computed,
            block_ids=tuple(
                state_of(ids, computed, group.block_size) if keeps_state(group) else tuple(ids) for group, ids in groups
            ),
            block_epoch=self._epochs.of(request),
            num_preemptions=request.num_preemptions,
            priority=request.priority,
            generator_state=self._runner.generator_state(request_id),
            prefill_stats=None if stats is None else dataclasses.astuple(stats),
            events=tuple((int(event.type), event.timestamp) for event in request.events),
            engine=self._engine,
        )

    def thaw(self, request_id: str) -> None:
        """Thaw the settled request: it continues, with its KV, in the next step with a free slot."""
        from vllm.v1.request import RequestStatus

        departure = self._settled(request_id)
        request, scheduler = departure.request, self._scheduler
        del self.frozen[request_id]
        scheduler.requests[request_id] = request
        if not can_copy_states(scheduler) and request.num_computed_tokens:  # nor can a step find them again
            scheduler.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            request.num_preemptions += 1
        if request.status == RequestStatus.RUNNING:
            # Its slot may be taken.  A preempted request that holds KV gets the first free one.
            request.status = RequestStatus.PREEMPTED
        if request.num_computed_tokens or departure.place is None:
            scheduler._enqueue_waiting_request(request)  # noqa: SLF001
        else:
            _put_back(scheduler, request, departure.place)

    def release(self, request_id: str) -> None:
        """Drop the request, settled or not, and free its blocks and its runner state.  The client gets no output."""
        departure = self.frozen.pop(request_id)
        self._scheduler.requests.pop(request_id, None)
        self._scheduler.encoder_cache_manager.free(departure.request)
        self._scheduler._free_request_blocks(departure.request)  # noqa: SLF001  late, if a step still writes to them
        self._scheduler.finished_req_ids.add(request_id)

    def _settled(self, request_id: str) -> _Departure:
        departure = self.frozen.get(request_id)
        if departure is None:
            raise MoveRefused(request_id, MoveRefusal.UNKNOWN)
        assert departure.settled, f"{request_id} is still in flight"
        return departure


def _take_off(scheduler: "Scheduler", request: "Request") -> int | None:
    """Remove the request from its queue, and return its place there if the queue is FCFS."""
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
    """Put a request without blocks back to its place in the queue."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    line = scheduler.waiting
    if isinstance(line, FCFSRequestQueue):
        line.insert(min(place, len(line)), request)
        if scheduler._is_blocked_waiting_status(request.status):  # noqa: SLF001
            scheduler.deferred_waiting.add(request)
    else:
        scheduler._enqueue_waiting_request(request)  # noqa: SLF001
