"""The report to the daemon after a step: the outputs with their leases, and the changes in the blocks.

Owns the reports' numbers.  For the engine thread: nothing is serialised here.
"""

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

IDLE = StepCounts()


class StepReporter:
    """A maker of step reports; `out` takes each report with its outputs."""

    def __init__(
        self,
        blocks: BlockReporter,
        book: Book,
        moves: Moves,
        out: "Callable[[wire.StepDone, EngineCoreOutputs | None], None]",
    ) -> None:
        self._blocks = blocks
        self._book = book
        self._moves = moves
        self._out = out
        self._reports = 0
        self._last_sums = (-1, -1, -1)

    def begin_again(self) -> None:
        """Restart report numbers at 1: the daemon has forgotten the earlier ones."""
        self._reports, self._last_sums = 0, (-1, -1, -1)

    def report(self, outputs: "EngineCoreOutputs | None", step_s: float, counts: StepCounts = IDLE) -> None:
        """Report the changes of a step that computed `counts`, if there are any."""
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
