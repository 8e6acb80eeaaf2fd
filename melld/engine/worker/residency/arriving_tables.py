"""The block tables of requests that arrive, before the scheduler has them.

Owns what vLLM's KV cache manager is told of a reservation, and what a table becomes when its request goes on.  Never
touches the scheduler's queues, and copies no bytes.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from melld.engine.worker.residency import states
from melld.engine.worker.residency.block_tables import decoder_groups_of, groups_of
from melld.migrate.snapshot import Reservation

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class ArrivingTables:
    """The tables of one engine's reservations."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler: Any = scheduler
        self._manager: Any = scheduler.kv_cache_manager
        self._groups: list[Any] = decoder_groups_of(scheduler)
        self._state_groups = [group for group in self._groups if states.keeps_state(group)]
        self._kinds = groups_of(scheduler)

    @property
    def forgets(self) -> bool:
        """Return True if a group drops early tokens, so that a larger reservation cannot start smaller."""
        return any(kind.window or kind.keeps_state for kind in self._kinds)

    def blocks_for_tokens(self, tokens: int) -> int:
        """Return the maximum number of blocks for this many tokens."""
        return sum(kind.blocks_for_tokens(tokens) for kind in self._kinds)

    def take(self, request: "Request", token_capacity: int, computed_tokens: int) -> int | None:
        """Allocate the request's blocks; return how many tokens are cached, or None if too few blocks are free.

        What it lacks of the `computed_tokens` will be copied: of those behind a window no block is taken.
        """
        self._manager.new_step_starts()  # what the last step has cached may be found now
        hit, reused_tokens = self._whole_hit(request)
        copied_tokens = max(computed_tokens - reused_tokens, 0)
        with self._not_emptied():
            taken = self._manager.allocate_slots(
                request,
                token_capacity - reused_tokens - copied_tokens,
                num_new_computed_tokens=reused_tokens,
                new_computed_blocks=hit,
                num_external_computed_tokens=copied_tokens,
                delay_cache_blocks=True,
                num_encoder_tokens=self._encoder_tokens(request),
            )
        if taken is None:
            self.free(request)  # groups of states note a request that asks
            return None
        for group in self._state_groups:
            states.keep_one(group, request.request_id, 0 if copied_tokens else reused_tokens // group.block_size)
        return reused_tokens

    def grow(self, request: "Request", token_capacity: int) -> bool:
        """Grow the request's blocks to this many tokens in total; return False if too few are free."""
        hits = [len(group.req_to_blocks[request.request_id]) - 1 for group in self._state_groups]
        with self._not_emptied():
            if self._manager.allocate_slots(request, token_capacity, delay_cache_blocks=True) is None:
                return False
        for group, hit_columns in zip(self._state_groups, hits, strict=True):
            states.keep_one(group, request.request_id, hit_columns)
        return True

    def reservation(self, request_id: str, reused_tokens: int) -> Reservation:
        """Return the blocks that can be copied into, and of each group how many need no copy."""
        groups, tables = self._manager.coordinator.single_type_managers, self._manager.get_block_ids(request_id)
        block_ids, reused_blocks = [], []
        for group, ids in zip(groups, tables, strict=True):
            keeps_state = states.keeps_state(group)
            block_ids.append(tuple(ids[-1:] if keeps_state else ids))
            reused_blocks.append(0 if keeps_state else reused_tokens // group.block_size)
        return Reservation(tuple(block_ids), tuple(reused_blocks))

    def settle(self, request: "Request", *, is_copied: bool) -> None:
        """Have vLLM continue with this table as its own, with the computed tokens in place.

        `is_copied`: they are in the blocks of the reservation, and not just in those that the prefix cache had.
        """
        request_id, computed_tokens = request.request_id, request.num_computed_tokens
        for group in self._state_groups:
            states.settle(group, request_id, computed_tokens, is_copied=is_copied)
        # Blocks that a window has left since they were reserved were not copied: they must not be cached.
        self._manager.remove_skipped_blocks(request_id, computed_tokens, request.num_prompt_tokens)
        for group in self._groups:  # what it does not need yet it takes when it grows, as any other does
            blocks, needed = group.req_to_blocks[request_id], -(-request.num_tokens // group.block_size)
            group.block_pool.free_blocks(blocks[needed:])
            del blocks[needed:]
            if group.records_new_block_ids:  # emptied by the next step, as this engine does with new blocks
                begun = -(-computed_tokens // group.block_size)
                group.new_block_ids.extend(block.block_id for block in blocks[begun:])
        self._manager.cache_blocks(request, computed_tokens)

    def free(self, request: "Request") -> None:
        """Free the request's blocks."""
        self._manager.free(request)

    def _whole_hit(self, request: "Request") -> tuple[Any, int]:
        """Return the request's prefix cache hits in whole blocks of all groups: no copy on write."""
        blocks, tokens, _ = self._manager.get_computed_blocks(request)
        whole = tokens // self._scheduler.block_size * self._scheduler.block_size
        if whole == tokens:
            return blocks, tokens
        if self._state_groups:  # the state is that after the last of these tokens
            return self._manager.empty_kv_cache_blocks, 0
        return self._manager.truncate_computed_blocks(blocks, whole), whole

    @contextlib.contextmanager
    def _not_emptied(self) -> Iterator[None]:
        """Keep the next step from clearing the blocks taken in the meantime: copies fill them."""
        groups = self._manager.coordinator.single_type_managers
        noted = [len(group.new_block_ids) for group in groups]
        yield
        for group, count in zip(groups, noted, strict=True):
            del group.new_block_ids[count:]

    def _encoder_tokens(self, request: "Request") -> int:
        """Return how many tokens of encoder output a decoder keeps for the request's audio."""
        inputs = range(len(request.mm_features)) if self._scheduler.is_encoder_decoder else ()
        return sum(request.get_num_encoder_embeds(index) for index in inputs)
