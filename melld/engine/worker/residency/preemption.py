"""Keeps out of the prefix cache what a preempted request has not computed.

A fix of vLLM 0.32.0, which names a block in its prefix cache when it plans the step that completes it.  Going by
priority, it may preempt a request that it has planned for in the same step: its block stays named, and a later request
reads what another has left there.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def forget_uncomputed(scheduler: "Scheduler") -> None:
    """Have this scheduler's preemptions drop from the prefix cache what no step has computed or is computing."""
    manager: Any = scheduler.kv_cache_manager
    preempt: Any = scheduler._preempt_request  # noqa: SLF001

    def forget_and_preempt(request: "Request", *rest: Any, **options: Any) -> None:
        tables, groups = manager.get_block_ids(request.request_id), manager.coordinator.single_type_managers
        # The tokens of the step that is being planned are counted once all of it is planned.
        computed = [request.num_computed_tokens // group.block_size for group in groups]
        manager.evict_blocks({block for table, full in zip(tables, computed, strict=True) for block in table[full:]})
        preempt(request, *rest, **options)

    scheduler._preempt_request = forget_and_preempt  # noqa: SLF001
