"""vLLM's scheduler as workers run it: steps are budgeted, and requests may arrive with blocks.

Owns what subclasses of vLLM's two schedulers do differently; vLLM takes them by `scheduler_cls`.  Decides nothing:
`budget` does.
"""

from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class Steps(Protocol):
    """Hooks around a scheduler's steps."""

    def before(self) -> None:
        """Set the limits of the step that is about to be scheduled."""

    def scheduled(self, output: SchedulerOutput) -> None:
        """Note what it will compute."""

    def lines_up(self, request: Request) -> None:
        """Set the due time of a request that is about to be queued."""


class StepByStep(Scheduler):  # type: ignore[misc]  # vLLM is not checked: its classes are Any
    """The scheduler of an engine without steps in flight."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: Steps | None = None
        """Who budgets the steps; None: vLLM, by itself."""
        # With steps in flight, one of them may still write to a block that an ended request has freed.  Vital here, as
        # for vLLM's KV connectors: copies write to reserved blocks from outside of its stream.
        self.defer_block_free |= self.vllm_config.max_concurrent_batches > 1

    def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
        """See vLLM."""
        if self.steps is None:
            return super().schedule(*arguments, **options)
        self.steps.before()
        output = super().schedule(*arguments, **options)
        self.steps.scheduled(output)
        return output

    def _enqueue_waiting_request(self, request: Request) -> None:
        if self.steps is not None:
            self.steps.lines_up(request)
        super()._enqueue_waiting_request(request)

    def _holds_kv_blocks(self, request: Request) -> bool:
        """Return True if the request has blocks: it then has its own queue, never behind one that wants blocks.

        vLLM goes by computed tokens, of which a request that moves by its tokens has none.
        """
        return any(self.kv_cache_manager.get_block_ids(request.request_id))

    def _preempt_request(self, request: Request, *rest: Any, **options: Any) -> None:
        """Drop a preempted request's uncomputed blocks from the prefix cache.

        A fix of vLLM 0.32.0, which names a block in its prefix cache when it plans the step that completes it.  Going
        by priority, it may preempt a request that it has planned for in the same step: its block stays named, and a
        later request reads what another has left there.
        """
        manager = self.kv_cache_manager
        tables, groups = manager.get_block_ids(request.request_id), manager.coordinator.single_type_managers
        # The tokens of the step that is being planned are counted once all of it is planned.
        computed = [request.num_computed_tokens // group.block_size for group in groups]
        manager.evict_blocks({block for table, full in zip(tables, computed, strict=True) for block in table[full:]})
        super()._preempt_request(request, *rest, **options)


class OneAhead(StepByStep, AsyncScheduler):  # type: ignore[misc]
    """The scheduler of an engine with a step in flight: vLLM's own, with the same changes."""


_KINDS = {Scheduler: StepByStep, AsyncScheduler: OneAhead}


def schedule_here(config: VllmConfig) -> None:
    """Make an engine of this configuration use one of these schedulers instead of its own."""
    own = config.scheduler_config.get_scheduler_cls()
    config.scheduler_config.scheduler_cls = _KINDS.get(own, own)
