"""How fast a request is computed ahead of its move: in slices, between which others decode undisturbed.

Owns when the next slice may begin, and how long it may be.  Pure: no clock.
"""

WINDOW_S = 0.1
"""A slice holds no more than may be computed in so long: a rate is kept in every such time, not only in the mean."""


class SlicePace:
    """The pace of one request.  `tokens_per_s` 0: no limit."""

    def __init__(self, tokens_per_s: float, block_tokens: int) -> None:
        self._tokens_per_s = tokens_per_s
        self._block_tokens = block_tokens
        self.due_s = 0.0

    def slice_tokens(self, wanted: int) -> int:
        """So many tokens of those wanted may be in one slice: whole blocks, at least one."""
        if not self._tokens_per_s:
            return wanted
        blocks = int(self._tokens_per_s * WINDOW_S) // self._block_tokens
        return min(wanted, max(blocks, 1) * self._block_tokens)

    def began(self, tokens: int, now_s: float) -> None:
        """A slice of so many begins now: none other may before `due_s`."""
        self.due_s = now_s + tokens / self._tokens_per_s if self._tokens_per_s else now_s
