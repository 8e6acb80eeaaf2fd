"""Describes requests that are about to leave a worker: at once, or when a chunk of a prompt is computed.

Owns the commands that wait for a chunk or a first token, and how long the last step took.  For the engine thread,
between two steps.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from melld.engine.worker.migration_book import names_of
from melld.engine.worker.residency.residency import Residency
from melld.migrate import messages as say
from melld.migrate.snapshot import MoveRefusal, MoveRefused, RequestFacts, Via

PATIENCE_S = 5.0
"""Longest wait for a chunk before the daemon hears that there is none yet."""


class Descriptions:
    """The answers to `DescribeRequest`.

    `answer(message, payload)` goes to the daemon; `freeze` stops a command's request, and answers for it.
    """

    def __init__(
        self,
        residency: Residency,
        answer: Callable[[Any, Sequence[bytes]], None],
        freeze: Callable[[say.DescribeRequest], None],
    ) -> None:
        self._residency = residency
        self._answer = answer
        self._freeze = freeze
        self._parked: dict[str, tuple[say.DescribeRequest, float]] = {}
        self._step_s = 0.0

    def after_step(self, step_s: float, refuse: Callable[[say.DescribeRequest, MoveRefused], None]) -> None:
        """Answer the parked commands whose chunk, or first token, was computed in the step; `refuse` the impossible."""
        now_s, self._step_s = time.monotonic(), step_s or self._step_s
        for command, since_s in list(self._parked.values()):
            try:
                self._look_again(command, is_late=now_s - since_s > PATIENCE_S)
            except MoveRefused as error:
                self.drop(command.request)
                refuse(command, error)

    def describe(self, command: say.DescribeRequest) -> None:
        """Answer the command, or park it."""
        facts = self._residency.facts(command.request)
        if command.beyond is None:
            self._tell(command, facts)
        else:
            self._parked[command.request] = command, time.monotonic()
            self._look_again(command, is_late=False)

    def drop(self, request: str) -> None:
        """Drop the request's parked command, if any: no reply is expected."""
        self._parked.pop(request, None)

    def _look_again(self, command: say.DescribeRequest, *, is_late: bool) -> None:
        """Freeze the request between its first and second token, or if it has nothing new; else report what is new.

        A command that comes later finds more to copy, and the request had better decode meanwhile.
        """
        facts = self._residency.facts(command.request)
        is_new = facts.full_blocks != command.beyond
        tokens = facts.num_tokens - facts.num_prompt_tokens
        if not facts.in_prompt and (tokens <= 1 or not is_new):
            self.drop(command.request)
            self._freeze(command)
        elif is_new or is_late:
            self.drop(command.request)
            self._tell(command, facts)

    def _tell(self, command: say.DescribeRequest, facts: RequestFacts) -> None:
        refusals = {via: self._residency.refusal(command.request, via) for via in Via}
        passing = MoveRefusal.PROMPT_LOGPROBS if command.freeze_after_first_token else None
        described = say.RequestDescribed(
            **names_of(command),
            facts=facts,
            refusals={via: refusal.value for via, refusal in refusals.items() if refusal not in (None, passing)},
            step_s=self._step_s,
        )
        self._answer(described, ())
