"""Spreads long work over turns of the event loop: one piece in each turn, of any caller.

Owns the queue of waiting pieces, first come first served.  A thread would not help: the pieces hold the interpreter's
lock, and so block the loop from any thread.
"""

import asyncio


class Turns:
    """A turn of the loop for each piece.  A caller with many pieces asks again for each."""

    def __init__(self) -> None:
        self._queue = asyncio.Lock()
        self._taken = False

    async def mine(self) -> None:
        """Return in a turn of the loop in which no other piece runs: at once if none has yet."""
        async with self._queue:
            if self._taken:
                await asyncio.sleep(0)
            self._taken = True
            asyncio.get_running_loop().call_soon(self._turned)

    def _turned(self) -> None:
        self._taken = False
