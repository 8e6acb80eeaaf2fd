"""The arithmetic of a worker's KV cache: tokens to blocks, blocks to bytes.

Never decides what fits: the scheduler does, on the ledger's facts.
"""

import msgspec


class KvGeometry(msgspec.Struct, frozen=True, gc=False):
    """The shape of a worker's KV cache.

    `block_tokens` is vLLM's block size; `block_bytes` is one block of all layers of a group together, keys and values.
    `windows`: of each group of layers its sliding window in tokens, 0 if it keeps all; each has blocks of its own.
    `encoder_tokens`: those of an encoder's output, which a request keeps in blocks of their own whatever its length.
    """

    block_tokens: int
    block_bytes: int
    windows: tuple[int, ...] = (0,)
    encoder_tokens: int = 0

    def blocks_for_tokens(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens`; the last one may be partly filled.

        Behind a window nothing is kept, but for the rest of a block.
        """
        kept = (min(tokens, window + self.block_tokens) if window else tokens for window in self.windows)
        return sum(-(-count // self.block_tokens) for count in (*kept, self.encoder_tokens))

    def bytes_for_tokens(self, tokens: int) -> int:
        """Return the bytes of the whole blocks that hold `tokens`."""
        return self.blocks_for_tokens(tokens) * self.block_bytes

    def bytes_for_blocks(self, blocks: int) -> int:
        """Return the bytes of `blocks`."""
        return blocks * self.block_bytes
