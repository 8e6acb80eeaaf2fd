"""An event loop that never waits: its clock jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Self


class _Jumping(selectors.SelectSelector):
    """Jumps the clock by what the loop would wait for a timer."""

    jump: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "the loop waits for something that never comes"
        if timeout > 0:
            self.jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.failures: list[dict[str, Any]] = []
        selector = _Jumping()
        selector.jump = self._jump
        super().__init__(selector)
        self.set_exception_handler(lambda _loop, context: self.failures.append(context))

    def _jump(self, seconds: float) -> None:
        self.now_s += seconds

    def time(self) -> float:
        return self.now_s

    def __enter__(self) -> Self:
        asyncio.set_event_loop(self)
        return self

    def __exit__(self, *_: object) -> None:
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        self.close()


def run_virtually(work: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Run the work to its end; it may wait for hours, and takes no time."""
    with VirtualLoop() as loop:
        loop.run_until_complete(work(loop))
        assert not loop.failures, loop.failures


async def end_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel these tasks; raise what one of them fell over."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
