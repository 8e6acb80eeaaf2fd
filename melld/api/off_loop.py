"""Does the work for large bodies off the event loop.

Owns one thread: more would only take the interpreter's lock from the loop more often.  Its work comes in small bites
(`melld.api.parsing`, `melld.api.guards.json_text`), because C code that holds the lock blocks the loop from any thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Made = TypeVar("Made")
SMALL_BODY_BYTES = 16 << 10
"""A body up to this size is handled on the loop: it takes a few milliseconds at worst, and a thread costs more."""


class OffLoop:
    """Runs functions on bodies."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="melld-bodies")

    async def run(self, body_bytes: int, work: Callable[..., Made], *arguments: Any) -> Made:
        """Run `work`, in the thread if the body is large, and return its result."""
        if body_bytes <= SMALL_BODY_BYTES:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """End the thread after its current work, without waiting."""
        self._thread.shutdown(wait=False, cancel_futures=True)
