"""Who a request is from, and what its call has asked for, on the way through vLLM's serving classes.

Owns one context variable.  vLLM's classes carry no such field from the HTTP request to the engine client, and the tasks
that they start inherit the context of the call.  It is set for one call and put back, so that the next call on the same
connection (and so in the same task) begins without it.  A client is a short name for an API key, never the key.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from melld.errors import TooManyPromptLogprobs, TooManyPromptLogprobsNow

CALLS_AT_ONCE = 16
"""So many calls may each have all the logprobs of prompts that one call may have."""


class LogprobAccount:
    """Counts the logprobs of prompts that calls in flight have asked for: all of an answer lies in memory at once."""

    def __init__(self) -> None:
        self.in_flight = 0


class Caller:
    """One call: whose it is, and what the fleet has admitted of it."""

    def __init__(self, client: str, account: LogprobAccount, max_prompt_logprobs: int) -> None:
        self.client = client
        """Empty where nobody asks for keys."""
        self.admitted = asyncio.Event()
        """Set when a request of it has been admitted."""
        self._account = account
        self._max_prompt_logprobs = max_prompt_logprobs
        self._prompt_logprobs = 0

    def take_prompt_logprobs(self, count: int) -> None:
        """Count those of one more request of the call.

        Raises:
            TooManyPromptLogprobs: for one call.
            TooManyPromptLogprobsNow: beside the other calls.
        """
        most = self._max_prompt_logprobs
        if self._prompt_logprobs + count > most:
            raise TooManyPromptLogprobs(self._prompt_logprobs + count, most)
        if self._account.in_flight + count > CALLS_AT_ONCE * most:
            raise TooManyPromptLogprobsNow
        self._prompt_logprobs += count
        self._account.in_flight += count

    def end(self) -> None:
        """Give back what it has taken."""
        self._account.in_flight -= self._prompt_logprobs
        self._prompt_logprobs = 0


_CALLER: ContextVar[Caller] = ContextVar("melld_caller")


@contextmanager
def called_by(called: Caller) -> Iterator[Caller]:
    """What is admitted in this context, and in tasks begun in it, is of this call."""
    token = _CALLER.set(called)
    try:
        yield called
    finally:
        _CALLER.reset(token)
        called.end()


def caller() -> Caller:
    """Return the call that a request being admitted is of.

    Raises:
        LookupError: outside of any.
    """
    return _CALLER.get()
