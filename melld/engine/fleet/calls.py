"""Calls of workers' engines, each with its number, and the answers to them.

Owns the numbers and the futures of those who wait.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from melld.engine.wire import messages as wire
from melld.ids import WorkerId


class Calls:
    """Those under way, of all workers.  `send` writes to a worker's wire."""

    def __init__(self, send: Callable[[WorkerId, msgspec.Struct], None]) -> None:
        self._send = send
        self._futures: dict[int, tuple[WorkerId, asyncio.Future[Any]]] = {}
        self._numbers = 0

    async def ask(self, worker: WorkerId, make: Callable[[int], msgspec.Struct], deadline_s: float) -> Any:
        """The result of one call of one worker; `make` makes the message from the call's number.

        Raises:
            RuntimeError: it failed, with the worker's words, or the worker ended first.
            TimeoutError: the worker did not answer.
        """
        return await asyncio.wait_for(self._begin(worker, make), deadline_s)

    async def ask_all(self, workers: Iterable[WorkerId], method: str, arguments: Sequence[Any]) -> list[Any]:
        """The results of one of `wire.UTILITIES` on these workers.

        Raises:
            RuntimeError: a worker's call failed, or the worker ended first.
        """
        if method not in wire.UTILITIES:
            raise ValueError(f"{method} is not among the calls that a worker takes")

        def make(call: int) -> wire.CallUtility:
            return wire.CallUtility(call=call, method=method, arguments=list(arguments))

        return list(await asyncio.gather(*(self._begin(worker, make) for worker in workers)))

    def answered(self, done: wire.UtilityDone) -> None:
        """A worker has done what it was called for, or could not.  An answer that nobody waits for is nothing."""
        _, future = self._futures.pop(done.call, (None, None))
        if future is None or future.done():
            return
        if done.error is not None:
            future.set_exception(RuntimeError(done.error))
        else:
            future.set_result(done.result)

    def worker_lost(self, worker: WorkerId) -> None:
        """It answers no more."""
        for asked, future in list(self._futures.values()):
            if asked == worker and not future.done():
                future.set_exception(RuntimeError(f"{worker} ended before it had answered"))

    def _begin(self, worker: WorkerId, make: Callable[[int], msgspec.Struct]) -> asyncio.Future[Any]:
        self._numbers += 1
        call = self._numbers
        future = asyncio.get_running_loop().create_future()
        self._futures[call] = worker, future
        future.add_done_callback(lambda _: self._futures.pop(call, None))
        self._send(worker, make(call))
        return future
