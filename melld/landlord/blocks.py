"""Maps an engine's blocks to the granules of its device's arena.

Arithmetic alone.  Every engine sees the whole arena as its KV cache, cut into blocks of its own size.

    granules   |  0 nobody's  |      1       |      2       |      3       |
    blocks     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | ...            usable: all granules that it touches granted

Block 0 is every engine's null block.  In the rest of granule 0 lie blocks to try an engine out with before it has any
(`scratch`).  Each engine has a granule 0 of its own: what it computes there must not depend on the others.
"""

import collections
from collections.abc import Collection, Iterable, Mapping

import msgspec


class BlockMap(msgspec.Struct, frozen=True, gc=False):
    """The blocks 0 .. `blocks` - 1 of one engine, `block_bytes` each, in an arena of granules."""

    block_bytes: int
    blocks: int
    granule_bytes: int

    def granules_of(self, block: int) -> range:
        """Return the granules that the block's bytes touch."""
        first_byte = block * self.block_bytes
        return range(first_byte // self.granule_bytes, -(-(first_byte + self.block_bytes) // self.granule_bytes))

    def touching(self, granule: int) -> range:
        """Return the blocks whose bytes touch the granule."""
        first_byte = granule * self.granule_bytes
        end = min(-(-(first_byte + self.granule_bytes) // self.block_bytes), self.blocks)
        return range(min(first_byte // self.block_bytes, end), end)

    def usable(self, granules: Iterable[int], granted: Collection[int]) -> set[int]:
        """Return the blocks that touch one of these granules, and whose bytes are all granted."""
        touching = {block for granule in granules for block in self.touching(granule)}
        return {block for block in touching if all(granule in granted for granule in self.granules_of(block))}

    @property
    def scratch(self) -> range:
        """Return the blocks in granule 0 that touch no engine's null block: a granule is at least eight blocks."""
        return range(-(-self.granule_bytes // 8 // self.block_bytes), self.granule_bytes // self.block_bytes)

    @property
    def trials(self) -> range:
        """Return the scratch blocks that link trials may overwrite: the others hold a worker's own first token."""
        return self.scratch[1:]


def choose_granules(
    blocks: BlockMap, granted: Collection[int], count: int, live: Mapping[int, bool], cached: Collection[int]
) -> list[int]:
    """Choose up to `count` granules to give back.

    `live`: the blocks in use, and whether each may be moved.  A granule with a block that may not is not chosen; then
    those with the fewest live blocks come first, with the fewest `cached` ones, and high numbers, so that what stays
    lies together.
    """
    moves: collections.Counter[int] = collections.Counter()
    losses: collections.Counter[int] = collections.Counter()
    pinned: set[int] = set()
    for block, movable in live.items():
        moves.update(blocks.granules_of(block))
        if not movable:
            pinned.update(blocks.granules_of(block))
    for block in cached:
        losses.update(blocks.granules_of(block))
    return sorted(set(granted) - pinned, key=lambda granule: (moves[granule], losses[granule], -granule))[:count]
