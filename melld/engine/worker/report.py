"""The report to the daemon after a step: tokens and outputs with their leases, and the changes in the blocks.

Owns which outputs are no more than tokens, the reports' numbers, and how often they carry vLLM's statistics.  For the
engine thread: nothing is serialised here.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from melld.engine.wire import messages as wire
from melld.engine.worker.migration import Moves
from melld.engine.worker.migration_book import Book
from melld.engine.worker.residency.block_tables import BlockReporter
from melld.engine.worker.residency.budget import StepCounts
from melld.ids import RequestId
from melld.migrate.snapshot import WARM_SUFFIX

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
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
        leases, tokens, book = dict[str, int](), dict[RequestId, list[int]](), self._book
        others: list[EngineCoreOutput] = []
        for output in outputs.outputs if outputs is not None else ():
            request = RequestId(output.request_id)
            if lease := book.leases.get(request):
                leases[request] = lease
            if continues(output) and request not in tokens:
                tokens[request] = output.new_token_ids
                continue
            others.append(output)
            if output.finish_reason is not None:
                book.left(request)
        blocks = self._blocks.collect()
        sums = (blocks.used_blocks, blocks.shared_blocks, blocks.total_blocks)
        if outputs is None and not blocks.changed and not book.gone and sums == self._last_sums:
            return
        self._last_sums = sums
        gone, book.gone = book.gone, []
        for warming in self._moves.warming:
            blocks.changed.pop(warming + WARM_SUFFIX, None)
        self._reports += 1
        done = wire.StepDone(
            step=self._reports,
            step_s=step_s,
            blocks=blocks,
            leases=leases,
            gone=gone,
            decodes=counts.decodes,
            prompt_tokens=counts.prompt_tokens,
            timestamp_s=outputs.timestamp if outputs is not None else 0.0,
            tokens=tokens,
        )
        if outputs is not None:
            outputs.outputs = others
        self._out(done, outputs if outputs is not None and (others or outputs.scheduler_stats is not None) else None)

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


def continues(output: "EngineCoreOutput") -> bool:
    """Return True if an output holds only the next tokens."""
    return (
        output.finish_reason is None
        and output.new_logprobs is None
        and output.new_prompt_logprobs_tensors is None
        and output.pooling_output is None
        and output.events is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.prefill_stats is None
        and output.routed_experts is None
        and not output.num_nans_in_logits
        and output.mm_cache_miss_hashes is None
        and output.new_sampling_mask is None
        and output.spec_decode_metrics is None
        and output.prompt_token_id_logprobs is None
    )
