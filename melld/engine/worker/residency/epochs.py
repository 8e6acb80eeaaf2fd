"""Says whether a request still has the blocks that it had: copies of them are worth nothing once it has others.

Owns the count of moves within this worker; vLLM counts the preemptions.
"""

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class BlockEpochs:
    """The block epochs of one engine's requests."""

    def __init__(self) -> None:
        self._moves: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()

    def of(self, request: "Request") -> int:
        """Return a number that rises whenever blocks of the request are freed or moved while it is here."""
        return int(request.num_preemptions + self._moves.get(request, 0))

    def moved(self, request: "Request") -> None:
        """Note that blocks of the request have moved."""
        self._moves[request] = self._moves.get(request, 0) + 1
