"""Calls of workers' engines and the answers to them.

Owns the calls' numbers and the futures of their callers.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from melld.ids import WorkerId


class Calls:
    """The calls under way on all workers.  `send` writes to a worker's wire."""

    def __init__(self, send: Callable[[WorkerId, msgspec.Struct], None]) -> None:
        self._send = send
        self._futures: dict[int, tuple[WorkerId, asyncio.Future[Any]]] = {}
        self._numbers = 0

    def begin(self, worker: WorkerId, make: Callable[[int], msgspec.Struct]) -> asyncio.Future[Any]:
        """Call one worker; `make` builds the message from the call's number.

        The result is the worker's, or True if it ends first: what it was to do, its next process does.  A call that
        fails raises `RuntimeError` with the worker's message.
        """
        self._numbers += 1
        call = self._numbers
        future = asyncio.get_running_loop().create_future()
        self._futures[call] = worker, future
        future.add_done_callback(lambda _: self._futures.pop(call, None))
        self._send(worker, make(call))
        return future

    def answered(self, call: int, result: Any, error: str | None = None) -> None:
        """Pass a worker's reply to its caller, if one is waiting."""
        _, future = self._futures.pop(call, (None, None))
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(RuntimeError(error))
        else:
            future.set_result(result)

    def worker_lost(self, worker: WorkerId) -> None:
        """Answer every call of a worker that has ended."""
        for call, (asked, _) in list(self._futures.items()):
            if asked == worker:
                self.answered(call, True)
