"""A worker on a device that several models share: it uses only granted KV memory, and can doze.

Owns the takes of granules that wait, and whether the worker dozes: its process then waits without KV memory and
weights, and serves again sooner than a new one.  For the engine thread, between two steps; `residency` does the work.

    Doze ──► nothing runs ──► all granules back ──► a token, noted ──► weights gone ──► Dozed
    StopDozing ──► Dozed at once, with the weights that are there still
    Wake ──► weights read again ──► the same token with the same log-probability ──► WorkerReady

To the daemon a worker that dozes has ended, and one that wakes is new: without links, and its reports begin at 1.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from melld.engine.wire import messages as wire
from melld.engine.worker.links import Links
from melld.engine.worker.report import StepReporter
from melld.engine.worker.residency.block_tables import keeps_kv
from melld.engine.worker.residency.budget import StepBudget
from melld.engine.worker.residency.lent_blocks import Emptied, LentBlocks
from melld.engine.worker.residency.weights import CpuWeights, weights_of
from melld.engine.worker.start import warm_up

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class _Take(NamedTuple):
    """A take, and its deadline."""

    message: wire.TakeGranules
    due_s: float


class Borrower:
    """The granules of one worker.  `lent` is None without an arena; `say` sends a message to the daemon."""

    def __init__(self, lent: LentBlocks | None, say: Callable[[msgspec.Struct], None]) -> None:
        self._lent = lent
        self._say = say
        self._takes: list[_Take] = []

    def grant(self, granted: wire.GrantGranules) -> None:
        """Use these granules."""
        if self._lent is not None:
            self._lent.grant(granted.granules)

    def take(self, take: wire.TakeGranules) -> None:
        """Return granules as soon as possible."""
        self._takes.append(_Take(take, time.monotonic() + take.deadline_s))

    def go_on(self, is_busy: bool) -> Callable[[], tuple[Any, bool]] | None:
        """Answer the takes that can be answered now.

        At its deadline, or when nothing runs that could end, a take gets what can be given, whoever must wait for it.
        Return the step to do instead of the engine's own while one in flight is in the way of a take.
        """
        lent, instead = self._lent, None
        for take in list(self._takes):
            asked, is_due = take.message, not is_busy or time.monotonic() >= take.due_s
            emptied: Emptied | None = Emptied()
            if lent is not None and lent.in_flight:
                emptied = None
                if is_due or not lent.lacks(asked.granules):
                    instead = lent.end_step
            elif lent is not None:
                emptied = lent.empty(asked.granules, preempts=is_due)
            if emptied is not None:
                self._takes.remove(take)
                returned = wire.GranulesReturned(
                    take=asked.take, granules=emptied.granules, moved_blocks=emptied.moved_blocks, cause=asked.cause
                )
                self._say(returned)
        return instead


class Dozer:
    """The dozing of one worker.  `lent` is None without an arena; `say` sends a message to the daemon."""

    def __init__(
        self,
        engine: "EngineCore",
        lent: LentBlocks | None,
        budget: StepBudget,
        links: Links,
        reporter: StepReporter,
        say: Callable[[msgspec.Struct], None],
        is_wanted: threading.Event,
    ) -> None:
        self._is_wanted = is_wanted
        self._engine = engine
        self._lent = lent
        self._budget = budget
        self._links = links
        self._reporter = reporter
        self._say = say
        self._weights = weights_of(engine)
        self._is_asked = False
        self._proof: Any = None
        self.dozes = False

    def ask(self, _doze: wire.Doze) -> None:
        """Doze as soon as nothing runs."""
        self._is_wanted.clear()
        self._is_asked = True

    def go_on(self) -> None:
        """Doze now if requested and all blocks are free.  Call it only when idle."""
        lent = self._lent
        if not self._is_asked:
            return
        stays = lent is None and isinstance(self._weights, CpuWeights) and keeps_kv(self._engine.scheduler)
        refusal = "its KV memory is its own, and would stay" if stays else self._weights.refusal
        if refusal:
            self._is_asked = False
            self._say(wire.Dozed(failure=refusal))
        elif lent is None or lent.empty(len(lent.granted), preempts=False) is not None:
            self._is_asked = False
            self._proof = self._prove()
            self._links.close_all()
            self._weights.drop(self._is_wanted.is_set)
            ctypes.CDLL(None).malloc_trim(0)
            self.dozes = True
            self._say(wire.Dozed(resident_bytes=self._weights.held_bytes))

    def wake(self, ready: wire.WorkerReady) -> None:
        """Reload the weights and send `ready`.

        Raises:
            RuntimeError: they are not what they were.
        """
        began_s = time.monotonic()
        self._weights.restore()
        self.dozes = False
        if (proof := self._prove()) != self._proof:
            raise RuntimeError(f"with its weights read again the model answers {proof}, not {self._proof}")
        self._reporter.begin_again()
        self._say(msgspec.structs.replace(ready, load_s=time.monotonic() - began_s))

    def _prove(self) -> Any:
        """Return the warm-up's token and log-probability; for a pooling model, its numbers."""
        with self._budget.lifted(), self._lent.borrowed() if self._lent is not None else contextlib.nullcontext():
            output = warm_up(self._engine, logprobs=0)
        if output.pooling_output is not None:
            return output.pooling_output.tolist()
        assert output.new_logprobs is not None
        return output.new_token_ids, output.new_logprobs.logprobs.tolist()
