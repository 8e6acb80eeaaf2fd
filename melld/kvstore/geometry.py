"""The arithmetic of a worker's KV cache: tokens to blocks, blocks to bytes.

Never decides what fits: the scheduler does, on the ledger's facts.
"""

import msgspec


class KvGroup(msgspec.Struct, frozen=True, gc=False):
    """A group of layers with blocks of its own, each for `block_tokens`.

    `window`: the latest tokens that it keeps, 0 for all.  `keeps_state`: a block holds the state after its last token,
    and only the latest state is kept, besides the one that a step reads it from.
    """

    block_tokens: int
    window: int = 0
    keeps_state: bool = False

    def blocks_for_tokens(self, tokens: int) -> int:
        """Return the most blocks that `tokens` take: behind a window, only the rest of a block is kept."""
        window = 1 if self.keeps_state else self.window
        kept = min(tokens, window + self.block_tokens) if window else tokens
        return -(-kept // self.block_tokens)


class KvGeometry(msgspec.Struct, frozen=True, gc=False):
    """The shape of a worker's KV cache.

    `block_tokens`: of so many tokens a prefix is found again.  `block_bytes`: one block of all layers of any group.
    `encoder_tokens`: those of an encoder's output, which a request keeps in blocks of their own whatever its length.
    """

    block_tokens: int
    block_bytes: int
    groups: tuple[KvGroup, ...] = ()
    """Empty: one that keeps all."""
    encoder_tokens: int = 0
    keeps_kv: bool = True
    """False: the model keeps none.  Its requests count by their load: each token is a block of one byte."""

    def blocks_for_tokens(self, tokens: int) -> int:
        """Return the most blocks that hold `tokens`; the last one of each group may be partly filled."""
        groups = self.groups or (KvGroup(self.block_tokens),)
        return sum(group.blocks_for_tokens(tokens) for group in groups) - (-self.encoder_tokens // self.block_tokens)

    def bytes_for_tokens(self, tokens: int) -> int:
        """Return the bytes of the whole blocks that hold `tokens`."""
        return self.blocks_for_tokens(tokens) * self.block_bytes

    def bytes_for_blocks(self, blocks: int) -> int:
        """Return the bytes of `blocks`."""
        return blocks * self.block_bytes


WITHOUT_KV = KvGeometry(block_tokens=1, block_bytes=1, keeps_kv=False)
