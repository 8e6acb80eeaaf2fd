"""The wiring of a worker: the parts around its engine, in order of dependency.

Owns the wiring; runs nothing.  Loading this loads torch, so the process must have its environment before.
"""

import queue
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from melld.engine.wire.spec import WorkerSpec
from melld.engine.worker.grammars import Grammars
from melld.engine.worker.links import Links, share_memory
from melld.engine.worker.migration import Moves
from melld.engine.worker.migration_book import Book
from melld.engine.worker.preparer import Preparer
from melld.engine.worker.reader import Pulse, Received, read
from melld.engine.worker.report import StepReporter
from melld.engine.worker.requests import Requests
from melld.engine.worker.residency.arena import ArenaMemory
from melld.engine.worker.residency.block_tables import BlockEpochs, BlockReporter
from melld.engine.worker.residency.budget import Ages, StepBudget
from melld.engine.worker.residency.lent_blocks import LentBlocks
from melld.engine.worker.residency.residency import Residency
from melld.engine.worker.tenancy import Borrower, Dozer
from melld.engine.worker.writer import Writer
from melld.scheduler.steptimes import StepTimes

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class Parts:
    """The parts of one worker."""

    def __init__(
        self, engine: "EngineCore", spec: WorkerSpec, connection: socket.socket, arena: ArenaMemory | None
    ) -> None:
        """Build the parts around this engine.  `arena`: where its KV is; None: in memory of its own."""
        line: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Messages that the engine thread handles between two steps."""
        self.writer = Writer(connection)
        self.pulse = Pulse()
        say, book, epochs = self.writer.say, Book(), BlockEpochs()
        self.shared = share_memory(engine, arena.spec if arena is not None else None, spec.kv_interface)
        memory = self.shared.memory
        assert arena is None or memory is not None, self.shared.failure
        self.lent = lent = LentBlocks(engine, arena, memory, epochs) if arena and memory else None
        times = StepTimes()
        residency = Residency(engine, epochs, times, lent.map.trials if lent is not None else ())
        ages = Ages(engine.scheduler, spec.age_s, time.monotonic)
        expected, clock = (lambda: len(residency.expected)), self.pulse.daemon_s
        self.budget = budget = StepBudget(engine, times, spec.step_limit, spec.ttft_s, expected, ages, clock)
        self.links = links = Links(self.shared, spec.copy_rules, residency, self.inbox.put, say)
        self.moves = Moves(residency, links, book, say)
        blocks = BlockReporter(engine.scheduler, lambda: lent.held if lent is not None else 0)
        self.reporter = StepReporter(blocks, book, self.moves, self.writer.report)
        is_wanted = threading.Event()
        self.read = partial(read, connection, engine, line, say, self.pulse.pong, is_wanted)
        self.preparer = Preparer(line, residency, self.inbox, self.writer.tell)
        self.grammars = Grammars(engine.structured_output_manager)
        self.borrower = Borrower(lent, say)
        self.dozer = Dozer(engine, lent, budget, links, self.reporter, say, is_wanted)
        self.requests = Requests(residency, self.moves, book, say)
