"""The wiring of a worker: the parts around its engine, in the order in which they need each other.

Owns the wiring; runs nothing.  Loading this loads torch, so the process must have its environment before.
"""

import queue
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from melld.engine.wire.spec import WorkerSpec
from melld.engine.worker.doze import Dozer
from melld.engine.worker.grammars import Grammars
from melld.engine.worker.lending import Borrower
from melld.engine.worker.links import Links, Shared, share_memory
from melld.engine.worker.migration import Moves
from melld.engine.worker.migration_book import Book
from melld.engine.worker.preparer import Preparer
from melld.engine.worker.profile import Profiler
from melld.engine.worker.reader import Pulse, Reader, Received
from melld.engine.worker.report import StepReporter
from melld.engine.worker.requests import Requests
from melld.engine.worker.residency.arena import ArenaMemory
from melld.engine.worker.residency.block_tables import BlockReporter
from melld.engine.worker.residency.budget import Ages, StepBudget
from melld.engine.worker.residency.lent_blocks import LentBlocks
from melld.engine.worker.residency.residency import Residency
from melld.engine.worker.writer import Writer

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class Parts(NamedTuple):
    """The parts of one worker."""

    inbox: "queue.SimpleQueue[Any]"
    """Messages that the engine thread handles between two steps."""
    reader: Reader
    preparer: Preparer
    writer: Writer
    pulse: Pulse
    grammars: Grammars
    links: Links
    moves: Moves
    borrower: Borrower
    lent: LentBlocks | None
    dozer: Dozer
    requests: Requests
    profiler: Profiler
    reporter: StepReporter
    budget: StepBudget
    shared: Shared


def make_parts(engine: "EngineCore", spec: WorkerSpec, connection: socket.socket, arena: ArenaMemory | None) -> Parts:
    """Build the parts around this engine.  `arena`: where its KV is; None: in memory of its own."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    line: queue.SimpleQueue[Received] = queue.SimpleQueue()
    writer, pulse, book = Writer(connection), Pulse(), Book()
    shared = share_memory(engine, arena.spec if arena is not None else None, spec.kv_interface)
    memory = shared.memory
    assert arena is None or memory is not None, shared.failure
    lent = LentBlocks(engine, arena, memory) if arena is not None and memory is not None else None
    residency = Residency(engine, lent.map.scratch if lent is not None else ())
    ages = Ages(engine.scheduler, spec.age_s, time.monotonic)
    budget = StepBudget(engine, spec.step_limit, lambda: len(residency.expected), ages)
    links = Links(shared, spec.copy_rules, residency, inbox.put, writer.say)
    blocks = BlockReporter(engine.scheduler, lambda: lent.held if lent is not None else 0)
    moves = Moves(residency, links, book, writer.say)
    reporter = StepReporter(blocks, book, moves, writer.report)
    return Parts(
        inbox=inbox,
        reader=Reader(connection, engine, line, writer.say, pulse.pong),
        preparer=Preparer(line, _request_maker(engine), residency, inbox, writer.say),
        writer=writer,
        pulse=pulse,
        grammars=Grammars(engine.structured_output_manager),
        links=links,
        moves=moves,
        borrower=Borrower(lent, residency.epochs, writer.say),
        lent=lent,
        dozer=Dozer(engine, lent, residency.epochs, budget, links, reporter, writer.say),
        requests=Requests(residency, moves, book, writer.say),
        profiler=Profiler(engine, residency, links, budget, lambda: not inbox.empty(), writer.say, pulse.in_step),
        reporter=reporter,
        budget=budget,
        shared=shared,
    )


def _request_maker(engine: "EngineCore") -> Callable[[list[bytes]], Any]:
    """Return a decoder from the daemon's encoded request to vLLM's `Request`."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder

    decoder = MsgpackDecoder(EngineCoreRequest)

    def request_of(payload: list[bytes]) -> Any:
        request, _ = engine.preprocess_add_request(decoder.decode(payload))
        return request

    return request_of
