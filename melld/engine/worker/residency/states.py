"""The blocks of layers that keep a state instead of KV: Mamba 1 and 2, gated delta nets, short convolutions.

Owns what their tables look like, and never touches those of attention.  A state is one block of each such group,
whatever the request's length.  vLLM keeps it where a block of KV with the same tokens would be, and nothing before it:

    table   null  null  null  S      S: the state after `computed` tokens, at column (computed - 1) // block_size

The next step writes S in place or, where it begins a column, reads S and writes there.  Without a prefix cache a block
has room for all tokens, so S is always at column 0.  Until a request arrives, its table is what the prefix cache had,
and one block of its own, which the source's S will be copied into:

    reserved   null  hit  own          by KV   null  null  null  own          by tokens   null  hit
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def keeps_state(group: Any) -> bool:
    """Return True for a group (vllm.v1.core.single_type_kv_cache_manager) whose blocks hold states."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    return isinstance(group, MambaManager)


def can_copy_states(scheduler: "Scheduler") -> bool:
    """Return True if the block from `state_of` is all of the states that a request's next step needs.

    Drafted tokens have states in further blocks, and how many of them count is known to the runner alone; so is what
    ReplaySSM has not written to the state yet.  Hits of a part of a block are copied by the step that follows.
    """
    groups = [group for group in scheduler.kv_cache_manager.coordinator.single_type_managers if keeps_state(group)]
    return not groups or (
        all(_is_plain(group) for group in groups) and not scheduler.vllm_config.cache_config.use_replayssm
    )


def _is_plain(group: Any) -> bool:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    hits_parts = group.enable_caching and group.block_pool.hash_block_size < group.block_size
    return type(group) is MambaManager and not group.num_speculative_blocks and not hits_parts


def state_of(block_ids: list[int], computed_tokens: int, block_size: int) -> tuple[int, ...]:
    """Return the block of this table that holds the state after this many tokens."""
    return (block_ids[(computed_tokens - 1) // block_size],) if computed_tokens else ()


def count_states(group: Any, request_id: str) -> int:
    """Return how many blocks the request holds, skipping columns that vLLM has permanently emptied."""
    table = group.req_to_blocks[request_id]
    emptied = group._num_retired_blocks.get(request_id, 0) if group.mamba_cache_mode == "align" else 0  # noqa: SLF001
    return sum(not table[column].is_null for column in range(min(emptied, len(table)), len(table)))


def keep_one(group: Any, request_id: str, hit_columns: int) -> None:
    """Cut a reserved table to its cached columns plus one private block."""
    table = group.req_to_blocks[request_id]
    own, *others = (block for block in table[hit_columns:] if not block.is_null)
    table[hit_columns:] = [own]
    group.block_pool.free_blocks(others)


def settle(group: Any, request_id: str, computed_tokens: int, *, is_copied: bool) -> None:
    """Give the arrived request a table as after a prefix cache hit of this many tokens.

    `is_copied`: its own block holds the state; else that is in the prefix cache, or there is none yet.
    """
    *hit, own = group.req_to_blocks[request_id]
    column = (computed_tokens - 1) // group.block_size
    if is_copied:
        table, unused = [group._null_block] * column + [own], [block for block in hit if not block.is_null]  # noqa: SLF001
    else:
        table, unused = hit, [own]
        assert [block.is_null for block in hit[-1:]] == [False] * (column >= 0), f"{request_id} has no state"
        assert len(hit) == column + 1, f"{request_id} has a state of other tokens"
    group.req_to_blocks[request_id][:] = table
    group.block_pool.free_blocks(unused)
    group.num_cached_block[request_id] = column if is_copied else len(table)
    if group.mamba_cache_mode == "align":  # as for a request that no step has allocated for
        group._allocated_block_reqs.discard(request_id)  # noqa: SLF001
        for notes in (group.last_state_block_idx, group._num_retired_blocks, group._checkpoints):  # noqa: SLF001
            notes.pop(request_id, None)
