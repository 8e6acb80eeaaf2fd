"""Calls of workers' engines and the answers to them.

Owns the calls' numbers and the futures of their callers.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from melld.ids import WorkerId


class WorkerLost(RuntimeError):
    """The worker has ended before it answered."""

    def __init__(self, worker: WorkerId) -> None:
        super().__init__(f"{worker} exited before it replied")


class Calls:
    """The calls under way on all workers.  `send` writes to a worker's wire."""

    def __init__(self, send: Callable[[WorkerId, msgspec.Struct], None]) -> None:
        self._send = send
        self._futures: dict[int, tuple[WorkerId, asyncio.Future[Any]]] = {}
        self._numbers = 0

    async def ask(self, worker: WorkerId, make: Callable[[int], msgspec.Struct], deadline_s: float) -> Any:
        """Call one worker and return the result; `make` builds the message from the call's number.

        Raises:
            RuntimeError: the call failed (the message is the worker's).
            WorkerLost: the worker ended first.
            TimeoutError: the worker did not answer by the deadline.
        """
        return await asyncio.wait_for(self.begin(worker, make), deadline_s)

    def answered(self, call: int, result: Any, error: str | None = None) -> bool:
        """Pass a worker's reply to its caller; return False if none is waiting."""
        _, future = self._futures.pop(call, (None, None))
        if future is None or future.done():
            return False
        if error is not None:
            future.set_exception(RuntimeError(error))
        else:
            future.set_result(result)
        return True

    def worker_lost(self, worker: WorkerId) -> None:
        """Fail every call of a worker that has ended."""
        for asked, future in list(self._futures.values()):
            if asked == worker and not future.done():
                future.set_exception(WorkerLost(worker))

    def begin(self, worker: WorkerId, make: Callable[[int], msgspec.Struct]) -> asyncio.Future[Any]:
        """Call one worker; see `ask`, but for the deadline."""
        self._numbers += 1
        call = self._numbers
        future = asyncio.get_running_loop().create_future()
        self._futures[call] = worker, future
        future.add_done_callback(lambda _: self._futures.pop(call, None))
        self._send(worker, make(call))
        return future
