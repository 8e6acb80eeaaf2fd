"""Whether a worker steps: the answer to a ping, whoever hangs.

Owns two numbers.  The engine's thread writes them, the reader's reads them: each by itself is whole.
"""

import time

from melld.engine.wire import messages as wire


class Pulse:
    """One engine's steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._began_s = 0.0

    def in_step(self, began_s: float) -> None:
        """A step began then; 0.0: none runs now."""
        self._began_s = began_s

    def stepped(self) -> None:
        """One of those that the daemon counts has ended."""
        self._began_s = 0.0
        self._steps += 1

    def pong(self, requests: int) -> wire.Pong:
        """As it is now, with so many requests here."""
        began_s = self._began_s
        busy_s = time.monotonic() - began_s if began_s else 0.0
        return wire.Pong(steps=self._steps, busy_s=busy_s, requests=requests)
