"""A request's client and the priority and limits of its call, carried through vLLM's serving classes.

Owns one context variable: vLLM's classes pass no such field from the HTTP request to the engine client, but the tasks
that they start inherit the call's context.  The variable is set for one call and reset, so that the next call on the
same connection (and so in the same task) starts without it.  A client is a short name for an API key, never the key.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from melld.engine.frontend.moulds import Sink
from melld.engine.frontend.outlet import Outlet
from melld.errors import PromptRepeatedTooOften, TooManyPromptLogprobs, TooManyPromptLogprobsNow

CALLS_AT_ONCE = 16
"""Calls that may each use one call's full limit of prompt logprobs at the same time."""


class LogprobAccount:
    """Counts prompt logprobs requested by calls in flight, limited because each response is held in memory whole."""

    def __init__(self) -> None:
        self.in_flight = 0


class Caller:
    """A call: its client, and what the fleet has admitted so far."""

    def __init__(
        self,
        client: str,
        account: LogprobAccount,
        max_prompt_logprobs: int,
        max_repeated_prompt_tokens: int = 1 << 20,
        priority: int = 0,
    ) -> None:
        self.client = client
        """Empty if no API keys are set."""
        self.priority = priority
        """The priority of all its requests: lower goes first."""
        self.admitted = asyncio.Event()
        """True once one of its requests has been admitted."""
        self.line = asyncio.Lock()
        """Held while one of its requests is admitted, so that calls take turns, however many prompts they have."""
        self.outlet: Outlet | None = None
        """The outlet of its stream, if it has one."""
        self._account = account
        self._max_prompt_logprobs = max_prompt_logprobs
        self._max_repeated_prompt_tokens = max_repeated_prompt_tokens
        self._prompt_logprobs = 0

    @contextmanager
    def writing_to(self, sink: Sink) -> Iterator[None]:
        """Let the outlet write to `sink` too during this block, whose task writes everything else of the stream."""
        with nullcontext() if self.outlet is None else self.outlet.leading_to(sink):
            yield

    def check_repeated(self, prompt_tokens: int, choices: int) -> None:
        """Refuse a long prompt with many choices.

        Raises:
            PromptRepeatedTooOften: its copies have too many tokens.
        """
        if choices > 1 and prompt_tokens * choices > self._max_repeated_prompt_tokens:
            raise PromptRepeatedTooOften(prompt_tokens, choices, self._max_repeated_prompt_tokens)

    def take_prompt_logprobs(self, count: int) -> None:
        """Count the prompt logprobs of one more request of the call.

        Raises:
            TooManyPromptLogprobs: more than one call may have.
            TooManyPromptLogprobsNow: more than other calls leave at the moment.
        """
        most = self._max_prompt_logprobs
        if self._prompt_logprobs + count > most:
            raise TooManyPromptLogprobs(self._prompt_logprobs + count, most)
        if self._account.in_flight + count > CALLS_AT_ONCE * most:
            raise TooManyPromptLogprobsNow
        self._prompt_logprobs += count
        self._account.in_flight += count

    def end(self) -> None:
        """Release what the call holds."""
        self._account.in_flight -= self._prompt_logprobs
        self._prompt_logprobs = 0


_CALLER: ContextVar[Caller] = ContextVar("melld_caller")


@contextmanager
def called_by(called: Caller) -> Iterator[Caller]:
    """Attribute requests admitted in this context, and in tasks started in it, to this call."""
    token = _CALLER.set(called)
    try:
        yield called
    finally:
        _CALLER.reset(token)
        called.end()


def caller() -> Caller:
    """Return the call of the request that is being admitted.

    Raises:
        LookupError: outside any call.
    """
    return _CALLER.get()
