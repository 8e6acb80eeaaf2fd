"""The report to the daemon after a step: the outputs with their leases, and the changes in the blocks.

Owns the reports' numbers, and how often they carry vLLM's statistics.  For the engine thread: nothing is serialised
here.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from melld.engine.wire import messages as wire
from melld.engine.worker.migration import Moves
from melld.engine.worker.migration_book import Book
from melld.engine.worker.residency.block_tables import BlockReporter
from melld.engine.worker.residency.budget import StepCounts
from melld.migrate.snapshot import WARM_SUFFIX

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

STATISTICS_EVERY_S = 0.1
"""How often vLLM's statistics are sent while only the usage of its cache changes: they cost as much as a step."""
IDLE = StepCounts()


class StepReporter:
    """A maker of step reports; `out` takes each report with its outputs."""

    def __init__(
        self,
        blocks: BlockReporter,
        book: Book,
        moves: Moves,
        out: "Callable[[wire.StepDone, EngineCoreOutputs | None], None]",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = blocks
        self._book = book
        self._moves = moves
        self._out = out
        self._clock = clock
        self._reports = 0
        self._last_sums = (-1, -1, -1)
        self._statistics: SchedulerStats | None = None
        self._statistics_due_s = 0.0

    def begin_again(self) -> None:
        """Restart report numbers at 1: the daemon has forgotten the earlier ones."""
        self._reports, self._last_sums = 0, (-1, -1, -1)

    def report(self, outputs: "EngineCoreOutputs | None", step_s: float, counts: StepCounts = IDLE) -> None:
        """Report the changes of a step that computed `counts`, if there are any."""
        if outputs is not None and outputs.scheduler_stats is not None:
            outputs.scheduler_stats = self._news(outputs.scheduler_stats, self._clock())
        leases, book = {}, self._book
        for output in outputs.outputs if outputs is not None else ():
            if lease := book.leases.get(output.request_id):
                leases[output.request_id] = lease
            if output.finish_reason is not None:
                book.left(output.request_id)
        blocks = self._blocks.collect()
        sums = (blocks.used_blocks, blocks.shared_blocks, blocks.total_blocks)
        if outputs is None and not blocks.changed and not book.gone and sums == self._last_sums:
            return
        self._last_sums = sums
        gone, book.gone = book.gone, []
        for request in self._moves.warming:
            blocks.changed.pop(request + WARM_SUFFIX, None)
        self._reports += 1
        done = wire.StepDone(
            step=self._reports,
            step_s=step_s,
            blocks=blocks,
            leases=leases,
            gone=gone,
            decodes=counts.decodes,
            prompt_tokens=counts.prompt_tokens,
        )
        self._out(done, outputs)

    def _news(self, statistics: "SchedulerStats", now_s: float) -> "SchedulerStats | None":
        """Return the statistics unless they count nothing and tell of as many requests as the last ones.

        Without requests they are always returned: the last ones free the cache, and none may follow for hours.
        """
        last = self._statistics
        has_requests = statistics.num_running_reqs or statistics.num_waiting_reqs or statistics.num_skipped_waiting_reqs
        if has_requests and last is not None and now_s < self._statistics_due_s:
            last.kv_cache_usage = statistics.kv_cache_usage
            if statistics == last:
                return None
        self._statistics_due_s = now_s + STATISTICS_EVERY_S
        self._statistics = type(statistics)(
            num_running_reqs=statistics.num_running_reqs,
            num_waiting_reqs=statistics.num_waiting_reqs,
            num_skipped_waiting_reqs=statistics.num_skipped_waiting_reqs,
            num_kv_fetch_reqs_by_stage=statistics.num_kv_fetch_reqs_by_stage,
        )
        return statistics
