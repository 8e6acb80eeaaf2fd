"""Work that a large body asks for, off the event loop.

Owns one thread: more of them would only take the interpreter's lock from the loop more often.  What runs in it comes
in small bites (`melld.api.parsing`, `melld.api.guards.json_text`): C code that holds the lock stops the loop from any
thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Made = TypeVar("Made")
SMALL_BODY_BYTES = 16 << 10
"""A body up to this is dealt with at once: it takes a few milliseconds at worst, and a thread has its price."""


class OffLoop:
    """Runs functions of one body."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="melld-bodies")

    async def run(self, body_bytes: int, work: Callable[..., Made], *arguments: Any) -> Made:
        """Return what the work returns, or raise what it raises."""
        if body_bytes <= SMALL_BODY_BYTES:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """End the thread when its work is done; nobody waits for that."""
        self._thread.shutdown(wait=False, cancel_futures=True)
