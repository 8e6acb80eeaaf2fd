"""Pacing of the prefill ahead of a move by tokens: in slices, between which other requests decode undisturbed.

Owns the start and the length of the next slice.  Pure: no clock.
"""

WINDOW_S = 0.1
"""Longest slice: the rate holds within every such window, not only on average."""


class SlicePace:
    """Pace of one request.  `tokens_per_s` 0: no limit."""

    def __init__(self, tokens_per_s: float, block_tokens: int) -> None:
        self._tokens_per_s = tokens_per_s
        self._block_tokens = block_tokens
        self.due_s = 0.0

    def slice_tokens(self, wanted: int) -> int:
        """Return how many of the `wanted` tokens the next slice may have: whole blocks, at least one."""
        if not self._tokens_per_s:
            return wanted
        blocks = int(self._tokens_per_s * WINDOW_S) // self._block_tokens
        return min(wanted, max(blocks, 1) * self._block_tokens)

    def began(self, tokens: int, now_s: float) -> None:
        """Note that a slice of `tokens` begins now; the next may begin at `due_s`."""
        self.due_s = now_s + tokens / self._tokens_per_s if self._tokens_per_s else now_s
