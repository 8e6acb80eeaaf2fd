"""Long work on the event loop, in pieces: one of them in each turn of the loop, whoever's it is.

Owns the line of those that wait with a piece, first come first served.  A thread would not do: what the pieces are made
of holds the interpreter's lock, and so the loop, from any thread.
"""

import asyncio


class Turns:
    """One piece in a turn of the loop.  Who has many pieces asks anew for each of them."""

    def __init__(self) -> None:
        self._line = asyncio.Lock()
        self._taken = False

    async def mine(self) -> None:
        """Return in a turn of the loop in which no other piece runs: at once, if none has yet."""
        async with self._line:
            if self._taken:
                await asyncio.sleep(0)
            self._taken = True
            asyncio.get_running_loop().call_soon(self._turned)

    def _turned(self) -> None:
        self._taken = False
