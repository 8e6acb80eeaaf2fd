"""Guesses which workers hold the KV of a prompt's beginning in their prefix cache.

Owns, for each worker, hashes of the blocks that requests there have computed, the latest last, and no more than it has
blocks: vLLM evicts in about that order.  A wrong guess costs a prefill and nothing else, as the worker looks its blocks
up itself; so nothing is asked of it, and the hash is our own.

    arrived ──► cached tokens by worker          placed, moved ──► its prompt's blocks are that worker's
                                                 ended ──► and those of its answer, for the next turn of a chat
"""

import collections
from collections.abc import Hashable, Mapping, Sequence

from melld.ids import RequestId, WorkerId


class _Blocks:
    """The tokens of one request, hashed by whole blocks; each hash covers all before it."""

    def __init__(self, block_tokens: int, salt: Hashable) -> None:
        self.hashes: list[int] = []
        self._block_tokens = block_tokens
        self._last = hash(salt)
        self._rest: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        size, tokens = self._block_tokens, [*self._rest, *tokens]
        whole = len(tokens) // size * size
        for start in range(0, whole, size):
            self._last = hash((self._last, *tokens[start : start + size]))
            self.hashes.append(self._last)
        self._rest = tokens[whole:]


class PrefixIndex:
    """The guesses for all workers of one model."""

    def __init__(self) -> None:
        self._block_tokens = 0
        self._most: dict[WorkerId, int] = {}
        self._held: dict[WorkerId, collections.OrderedDict[int, None]] = {}
        self._requests: dict[RequestId, _Blocks] = {}

    @property
    def is_needed(self) -> bool:
        """Return True if a worker keeps prefixes."""
        return bool(self._held)

    def open_worker(self, worker: WorkerId, block_tokens: int, blocks: int) -> None:
        """Note a worker whose cache is empty."""
        self._block_tokens = block_tokens
        self._most[worker] = blocks
        self._held[worker] = collections.OrderedDict()

    def close_worker(self, worker: WorkerId) -> None:
        """Forget a worker that has ended."""
        self._held.pop(worker, None)

    def arrived(self, request: RequestId, tokens: Sequence[int], salt: Hashable) -> Mapping[WorkerId, int]:
        """Note a request; return how many tokens of its prompt each worker holds, if any.

        `salt`: what must be equal besides the tokens.  A worker computes at least the last token.
        """
        if not self._held:
            return {}
        blocks = self._requests[request] = _Blocks(self._block_tokens, salt)
        blocks.add(tokens)
        found = {worker: self._length(held, blocks.hashes) for worker, held in self._held.items()}
        most = max(len(tokens) - 1, 0)
        return {worker: min(count * self._block_tokens, most) for worker, count in found.items() if count}

    def placed(self, request: RequestId, worker: WorkerId) -> None:
        """Note that the worker computes the request's tokens, or has received their KV."""
        blocks = self._requests.get(request)
        if blocks is not None:
            self._hold(worker, blocks.hashes)

    def ended(self, request: RequestId, worker: WorkerId | None, output_tokens: Sequence[int]) -> None:
        """Forget a request; its worker keeps what it has computed."""
        blocks = self._requests.pop(request, None)
        if blocks is not None and worker is not None:
            blocks.add(output_tokens)
            self._hold(worker, blocks.hashes)

    def _hold(self, worker: WorkerId, hashes: Sequence[int]) -> None:
        held = self._held.get(worker)
        if held is None:
            return
        for one in reversed(hashes):  # the beginning is the last to be evicted
            held[one] = None
            held.move_to_end(one)
        while len(held) > self._most[worker]:
            held.popitem(last=False)

    @staticmethod
    def _length(held: Mapping[int, None], hashes: Sequence[int]) -> int:
        """Return how many blocks from the first on are held."""
        return next((count for count, one in enumerate(hashes) if one not in held), len(hashes))
