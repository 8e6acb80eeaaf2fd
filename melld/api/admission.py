"""Admits calls: limits how many run at once, in total and per client, and refuses them while not serving.

Owns the count of running calls, their tasks, each client's share of the places, and the API's lifecycle:

    open ──begin_drain──► draining ──abort──► aborted ──reopen──► open
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from melld.api.answers import Refusal

RETRY_AFTER = {"Retry-After": "1"}


class Door(Enum):
    """The lifecycle of the daemon's API."""

    OPEN = "open"
    DRAINING = "draining"
    ABORTED = "aborted"


class Admission:
    """Counts the running calls.  One per daemon."""

    def __init__(
        self,
        max_concurrent: Callable[[], int],
        why_closed: Callable[[], str | None],
        known_clients: Callable[[], int] = lambda: 1,
    ) -> None:
        """Take `why_closed`, which returns a short reason why no call is admitted, or None."""
        self._max_concurrent = max_concurrent
        self._why_closed = why_closed
        self._known_clients = known_clients
        self._calls: set[asyncio.Task[object]] = set()
        self._calls_of: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.door = Door.OPEN

    @property
    def in_flight(self) -> int:
        """Return the number of running calls."""
        return len(self._calls)

    def why_closed(self) -> str | None:
        """Say why a call of any client would be refused; None if it would not."""
        return "draining" if self.door is not Door.OPEN else self._why_closed()

    def check(self, client: str = "") -> None:
        """Refuse what `call` would refuse, before anything has been read.

        Raises:
            Refusal: 503 while draining or not ready, 429 at the limit of calls, in total or of this client.
        """
        check_open(self.why_closed())
        if len(self._calls) >= self._max_concurrent():
            message = f"{len(self._calls)} requests are already running"
            raise Refusal(429, message, code="too_many_requests", headers=RETRY_AFTER)
        if self._calls_of[client] >= self.share(client):
            message = f"{self._calls_of[client]} requests of this key are already running"
            raise Refusal(429, message, code="too_many_requests_of_key", headers=RETRY_AFTER)

    def share(self, client: str) -> int:
        """Return how many places the client may hold; there is always room for one more client than there are now."""
        others = sum(count > 0 and name != client for name, count in self._calls_of.items())
        parts = max(1, min(others + 2, self._known_clients()))
        return max(1, self._max_concurrent() // parts)

    @contextmanager
    def call(self, client: str = "", *, goes_on: bool = False) -> Iterator[None]:
        """Hold a place for the client's call, the current task; if it `goes_on`, it was admitted before.

        Raises:
            Refusal: see `check`.
        """
        if not goes_on:
            self.check(client)
        task = asyncio.current_task()
        assert task is not None
        assert task not in self._calls
        self._calls.add(task)
        self._calls_of[client] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls.discard(task)
            self._calls_of[client] -= 1
            if not self._calls:
                self._idle.set()

    def begin_drain(self) -> None:
        """Stop admitting calls; running ones continue."""
        if self.door is Door.OPEN:
            self.door = Door.DRAINING

    def reopen(self) -> None:
        """Admit calls again."""
        self.door = Door.OPEN

    async def wait_idle(self, deadline_s: float | None) -> bool:
        """Wait up to `deadline_s` (None: forever) for the last call to end; return False if one still runs."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def wait_or_abort(self, deadline_s: float, at_once: asyncio.Event) -> None:
        """Wait for the last call to end; abort those that still run at the deadline, or once `at_once` is set."""
        idle = asyncio.ensure_future(self.wait_idle(deadline_s))
        aborted = asyncio.ensure_future(at_once.wait())
        await asyncio.wait({idle, aborted}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        aborted.cancel()
        if self.in_flight:
            self.abort()

    def abort(self) -> int:
        """End every call now, each with an answer to its client; return how many there were."""
        self.door = Door.ABORTED
        for task in self._calls:
            task.cancel()
        return len(self._calls)

    @property
    def aborted(self) -> bool:
        """Return True if the daemon, not the client, cancelled the call."""
        return self.door is Door.ABORTED


def check_open(why_closed: str | None) -> None:
    """Refuse a call that nothing would ever compute, for this reason; None: something may.

    Raises:
        Refusal: 503.
    """
    if why_closed is not None:
        raise Refusal(503, f"not accepting requests: {why_closed}", code="unavailable", headers=RETRY_AFTER)


def shutting_down() -> Refusal:
    """Return the answer to clients of aborted calls."""
    return Refusal(503, "the daemon is shutting down", code="shutting_down", headers=RETRY_AFTER)
