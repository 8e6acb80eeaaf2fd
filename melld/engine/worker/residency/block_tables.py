"""The ledger's facts from vLLM's block tables: the blocks of each request, reported on change.

Owns the reading; never changes vLLM.  Runs on the engine thread between two steps, so every token pays for it: in
steady decoding a request costs one length and two comparisons, and is reported only when a block was added (about once
in `block_size` steps) or its phase changed.

    used blocks = total - free; free includes what only the prefix cache holds; a shared block is used once.
    shared blocks = sum of all block tables - used, with reservations and departing requests included.

Requests of a model that keeps no KV hold their tokens, as if each were a block: that is their load.
"""

import bisect
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from melld.engine.wire.messages import BlockReport
from melld.engine.worker.residency.states import count_states, keeps_state
from melld.kvstore.geometry import KvGroup
from melld.migrate.snapshot import Phase

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

RequestBlocks = tuple[int, Phase]
UNLIMITED_TOKENS = 1 << 40
"""Where none leaves KV behind, the number of requests is the only limit."""


class BlockEpochs:
    """The block epochs of one engine's requests: copies are void once a request has other blocks.

    Counts the moves within this worker; vLLM counts the preemptions.
    """

    def __init__(self) -> None:
        self._moves: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()

    def of(self, request: "Request") -> int:
        """Return a number that rises whenever the request's blocks are freed or moved."""
        return int(request.num_preemptions + self._moves.get(request, 0))

    def moved(self, request: "Request") -> None:
        """Note that blocks of the request have moved."""
        self._moves[request] = self._moves.get(request, 0) + 1


class BlockReporter:
    """A reporter of changes in a scheduler's block tables since its last report (vllm.v1.core.sched.scheduler).

    `held` returns how many of vLLM's blocks the worker may not use now: they count neither as used nor in the total.
    """

    def __init__(self, scheduler: "Scheduler", held: Callable[[], int] = lambda: 0) -> None:
        self._scheduler = scheduler
        self._held = held
        manager = scheduler.kv_cache_manager
        self._pool = manager.block_pool
        groups = manager.coordinator.single_type_managers
        self._tables = [group.req_to_blocks for group in groups]
        self._counts = [_count_of(group) for group in groups]
        self._keeps_all = all(not group.window and not group.keeps_state for group in groups_of(scheduler))
        self._keeps_kv = keeps_kv(scheduler)
        self._total_blocks = total_blocks_of(scheduler)
        self._last: dict[str, RequestBlocks] = {}

    def collect(self) -> BlockReport:
        """Return the blocks in use, and every request whose blocks or phase changed since the last call.

        An ended request is not listed; the step's outputs show its end.
        """
        requests = self._scheduler.requests
        last = self._last
        changed: dict[str, RequestBlocks] = {}
        for request_id, request in requests.items():
            blocks = self._blocks(request_id)
            before = last.get(request_id)
            if before == (blocks, Phase.DECODING) and request.num_computed_tokens:  # it decodes on
                continue
            facts = blocks, phase_of(request)
            if facts != before:
                last[request_id] = changed[request_id] = facts
        if len(last) > len(requests):
            self._last = {request_id: facts for request_id, facts in last.items() if request_id in requests}
        if not self._keeps_kv:
            tokens = sum(request.num_tokens for request in requests.values())
            return BlockReport(tokens, self._total_blocks, 0, changed)
        total_blocks = self._total_blocks - self._held()
        used_blocks = total_blocks - self._pool.get_num_free_blocks()
        if self._keeps_all:
            named_blocks = sum(sum(map(len, table.values())) for table in self._tables)
        else:
            named_blocks = sum(sum(map(count, table)) for table, count in zip(self._tables, self._counts, strict=True))
        # Blocks without a table may stay in use until a step in flight has ended.
        return BlockReport(used_blocks, total_blocks, max(named_blocks - used_blocks, 0), changed)

    def _blocks(self, request_id: str) -> int:
        tables = self._tables
        if not self._keeps_kv:
            return int(self._scheduler.requests[request_id].num_tokens)
        if len(tables) == 1 and self._keeps_all:
            held = tables[0].get(request_id)
            return len(held) if held is not None else 0
        counted = zip(tables, self._counts, strict=True)
        return sum(count(request_id) for table, count in counted if request_id in table)


def keeps_kv(scheduler: "Scheduler") -> bool:
    """Return False for a model such as BERT, whose layers see a whole prompt at once and keep nothing."""
    return bool(scheduler.kv_cache_config.kv_cache_groups)


def total_blocks_of(scheduler: "Scheduler") -> int:
    """Return how many blocks all requests together may use, without vLLM's null block."""
    return int(scheduler.kv_cache_config.num_blocks - 1) if keeps_kv(scheduler) else UNLIMITED_TOKENS


def decoder_groups_of(scheduler: "Scheduler") -> "list[SingleTypeKVCacheManager]":
    """Return the KV cache groups that grow with a request's tokens: not the one of an encoder's output."""
    from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager

    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [group for group in groups if not isinstance(group, CrossAttentionManager)]


def groups_of(scheduler: "Scheduler") -> tuple[KvGroup, ...]:
    """Return what each of these groups keeps."""
    return tuple(
        KvGroup(group.block_size, _window_of(group), keeps_state(group)) for group in decoder_groups_of(scheduler)
    )


def _window_of(group: Any) -> int:
    """Return how many recent tokens this group keeps, by its window or chunk; 0 for all."""
    return int(getattr(group, "sliding_window", 0) or getattr(group, "attention_chunk_size", 0))


def encoder_tokens_of(scheduler: "Scheduler") -> int:
    """Return how many tokens of an encoder's output a request keeps, at most; 0 without such an encoder."""
    if not scheduler.is_encoder_decoder:
        return 0
    config = scheduler.vllm_config.model_config.hf_config
    return int(getattr(config, "max_source_positions", scheduler.max_num_encoder_input_tokens))


def _count_of(group: "SingleTypeKVCacheManager") -> Callable[[str], int]:
    """Return a counter of a request's blocks in this group, without the leading ones behind its window."""

    def count_in_window(request_id: str) -> int:
        blocks = group.req_to_blocks[request_id]
        return len(blocks) - bisect.bisect_left(blocks, True, key=lambda block: not block.is_null)

    if keeps_state(group):
        return partial(count_states, group)
    return count_in_window if _window_of(group) else lambda request_id: len(group.req_to_blocks[request_id])


def phase_of(request: "Request") -> Phase:
    """Return the request's phase: nothing computed, prefill under way, or one new token per step."""
    computed = request.num_computed_tokens
    if computed == 0:
        return Phase.WAITING
    # While decoding, one known token (the newest) waits to be computed; placeholders stand for tokens in flight.
    placeholders = request.num_output_placeholders
    generating = request.num_output_tokens + placeholders > 0
    missing = request.num_tokens + placeholders - computed
    return Phase.DECODING if generating and missing <= 1 else Phase.PREFILLING
