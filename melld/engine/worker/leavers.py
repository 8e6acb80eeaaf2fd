"""A worker's requests that are about to leave it: described, frozen, and let go or thawed.

Owns the commands that wait for a step: for a chunk of a prompt, its first token, or the last output of a frozen
request.  There is at most one for each request.  For the engine thread, between two steps.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from melld.engine.worker.migration_book import Book, names_of, refusal
from melld.engine.worker.residency.residency import Residency, Stillness
from melld.migrate import messages as say
from melld.migrate.snapshot import MoveRefusal, MoveRefused, RequestFacts, Via

PATIENCE_S = 5.0
"""Longest wait for a chunk before the daemon hears that there is none yet."""


class Leavers:
    """The source's side of this worker's migrations.  `answer(message, payload)` goes to the daemon."""

    def __init__(self, residency: Residency, book: Book, answer: Callable[[Any, Sequence[bytes]], None]) -> None:
        self._residency = residency
        self._book = book
        self._answer = answer
        self._waiting: dict[str, tuple[Any, float]] = {}  # the command, and since when it waits
        self._step_s = 0.0
        self.handlers: dict[type, Callable[[Any], None]] = {
            say.DescribeRequest: self._describe,
            say.FreezeRequest: lambda command: self._freeze(command, command.via),
            say.ReleaseRequest: self._release,
            say.ThawRequest: self._thaw,
        }

    def after_report(self, step_s: float) -> None:
        """Answer the commands that waited for this step of `step_s`, once its outputs are on their way."""
        now_s, self._step_s = time.monotonic(), step_s or self._step_s
        for request, (command, since_s) in list(self._waiting.items()):
            try:
                if request in self._residency.frozen:
                    self._settle(command, self._residency.stillness(request))
                else:
                    self._follow(command, self._residency.facts(request), is_late=now_s - since_s > PATIENCE_S)
            except MoveRefused as error:
                self.forget(request)
                self._answer(refusal(command, error), ())

    def forget(self, request: str) -> None:
        """Drop the request's waiting command, if any: no reply is expected."""
        self._waiting.pop(request, None)

    # -- described ---------------------------------------------------------------------------------------------------

    def _describe(self, command: say.DescribeRequest) -> None:
        """Answer the command, or let it wait."""
        facts = self._residency.facts(command.request)
        if command.beyond is None:
            self._tell(command, facts)
        else:
            self._waiting[command.request] = command, time.monotonic()
            self._follow(command, facts, is_late=False)

    def _follow(self, command: say.DescribeRequest, facts: RequestFacts, *, is_late: bool) -> None:
        """Freeze the request between its first and second token, or if it has nothing new; else report what is new.

        A command that comes later finds more to copy, and the request had better decode meanwhile.
        """
        is_new = facts.full_blocks != command.beyond
        tokens = facts.num_tokens - facts.num_prompt_tokens
        if not facts.in_prompt and (tokens <= 1 or not is_new):
            self.forget(command.request)
            self._freeze(command, Via.KV)
        elif is_new or is_late:
            self.forget(command.request)
            self._tell(command, facts)

    def _tell(self, command: say.DescribeRequest, facts: RequestFacts) -> None:
        refusals = {via: self._residency.refusal(command.request, via) for via in Via}
        passing = MoveRefusal.PROMPT_LOGPROBS if command.freeze_after_first_token else None
        described = say.RequestDescribed(
            **names_of(command),
            facts=facts,
            refusals={via: why.value for via, why in refusals.items() if why not in (None, passing)},
            step_s=self._step_s,
        )
        self._answer(described, ())

    # -- frozen ------------------------------------------------------------------------------------------------------

    def _freeze(self, command: say.FreezeRequest | say.DescribeRequest, via: Via) -> None:
        stillness = self._residency.freeze(command.request, via)
        self._waiting[command.request] = command, time.monotonic()
        self._settle(command, stillness)

    def _settle(self, command: say.MoveCommand, stillness: Stillness) -> None:
        request = command.request
        if stillness is Stillness.IN_FLIGHT:
            return
        self.forget(request)
        if isinstance(command, say.ThawRequest):
            if stillness is Stillness.SETTLED:
                self._residency.thaw(request)
            self._answer(say.RequestThawed(**names_of(command)), ())
        elif stillness is Stillness.ENDED:
            self._answer(say.CommandFailed(**names_of(command), reason="it has ended"), ())
        else:
            snapshot = self._residency.snapshot(request)
            self._answer(say.RequestFrozen(**names_of(command)), (msgspec.msgpack.encode(snapshot),))

    def _thaw(self, command: say.ThawRequest) -> None:
        waits = self._waiting.pop(command.request, None) is not None
        if command.request in self._residency.frozen:
            if waits:  # for its last output
                self._waiting[command.request] = command, time.monotonic()
                return
            self._residency.thaw(command.request)
        self._answer(say.RequestThawed(**names_of(command)), ())

    def _release(self, command: say.ReleaseRequest) -> None:
        if command.request in self._residency.frozen:
            self._residency.release(command.request)
            self._book.left(command.request)
        self._answer(say.RequestReleased(**names_of(command)), ())
