"""Blocks in granules, of any size: none is lost, and none is used before its granules are all granted."""

import random

from hypothesis import given
from hypothesis import strategies as st

from melld.landlord.blocks import BlockMap, choose_granules
from melld.landlord.granules import GRANULE_BLOCKS


@st.composite
def maps(draw: st.DrawFn) -> BlockMap:
    """Draw blocks of which at least eight fit into a granule."""
    block_bytes = draw(st.integers(1, 40))
    granule_bytes = GRANULE_BLOCKS * block_bytes + draw(st.integers(0, 100))
    arena_bytes = granule_bytes * draw(st.integers(1, 12)) + draw(st.integers(0, granule_bytes - 1))
    return BlockMap(block_bytes, arena_bytes // block_bytes, granule_bytes)


@given(maps())
def test_granules_and_blocks_name_each_other(blocks: BlockMap) -> None:
    """A block belongs to each granule that its bytes touch, and to no other."""
    for block in range(blocks.blocks):
        first, last = block * blocks.block_bytes, (block + 1) * blocks.block_bytes - 1
        touched = {byte // blocks.granule_bytes for byte in (first, last)}
        assert touched == set(blocks.granules_of(block)), "no block is longer than a granule"
    for granule in range(blocks.blocks * blocks.block_bytes // blocks.granule_bytes + 1):
        named = {block for block in range(blocks.blocks) if granule in blocks.granules_of(block)}
        assert named == set(blocks.touching(granule))


@given(maps(), st.randoms(use_true_random=False))
def test_taking_leaves_exactly_what_is_still_granted(blocks: BlockMap, chance: random.Random) -> None:
    """Held and usable blocks are always all blocks; usable ones lie entirely in granted granules."""
    granules = range(1, blocks.blocks * blocks.block_bytes // blocks.granule_bytes)
    granted = {granule for granule in granules if chance.random() < 0.7}
    usable = blocks.usable(granted, granted)
    assert usable == {
        block for block in range(1, blocks.blocks) if all(granule in granted for granule in blocks.granules_of(block))
    }
    live = {block: chance.random() < 0.9 for block in sorted(usable) if chance.random() < 0.5}
    cached = [block for block in sorted(usable) if block not in live and chance.random() < 0.5]
    count = chance.randint(0, len(granted))
    taken = choose_granules(blocks, granted, count, live, cached)
    lost = blocks.usable(taken, granted)
    kept = granted.difference(taken)
    assert blocks.usable(kept, kept) == usable - lost
    assert lost <= usable
    assert len(set(taken)) == len(taken) <= count
    assert granted.issuperset(taken)
    assert all(live.get(block, True) for block in lost), "a block that must stay would be lost"
    if len(taken) < count:
        assert all(any(not live.get(block, True) for block in blocks.touching(granule)) for granule in kept)


def test_the_cheapest_granules_to_empty_go_first() -> None:
    """No block moves while a granule without live ones can be given; a warm prefix cache stays as long as possible."""
    blocks = BlockMap(block_bytes=1, blocks=48, granule_bytes=8)
    live = {8: True, 9: True, 16: True}
    assert choose_granules(blocks, {1, 2, 3, 4, 5}, 4, live, cached=[40]) == [4, 3, 5, 2]
    assert choose_granules(blocks, {1, 2, 3, 4, 5}, 4, live | {25: False}, cached=[40]) == [4, 5, 2, 1]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 100))
def test_scratch_blocks_touch_no_engine_s_null_block(small: int, large: int, more: int) -> None:
    """What one engine writes before any grant is never read by another."""
    small, large = sorted((small, large))
    granule_bytes = GRANULE_BLOCKS * large + more
    for block_bytes in (small, large):
        scratch = BlockMap(block_bytes, 1000, granule_bytes).scratch
        assert len(scratch) >= GRANULE_BLOCKS - 2
        assert scratch[0] * block_bytes >= large
        assert (scratch[-1] + 1) * block_bytes <= granule_bytes
