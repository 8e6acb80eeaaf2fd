"""Tokens to blocks to bytes: the arithmetic under every size that the scheduler sees."""

from hypothesis import given
from hypothesis import strategies as st

from melld.kvstore.geometry import KvGeometry, KvGroup

geometries = st.builds(KvGeometry, st.integers(1, 512), st.integers(1, 1 << 30))
groups = st.builds(KvGroup, st.integers(1, 512), st.integers(0, 4096), st.booleans())


@given(geometries, st.integers(0, 1 << 24))
def test_tokens_take_whole_blocks_and_no_block_too_many(geometry: KvGeometry, tokens: int) -> None:
    """A request's size is never underestimated, nor overestimated by a block."""
    blocks = geometry.blocks_for_tokens(tokens)
    assert blocks * geometry.block_tokens >= tokens
    assert (blocks - 1) * geometry.block_tokens < tokens or blocks == 0
    assert geometry.bytes_for_tokens(tokens) == geometry.bytes_for_blocks(blocks)


def test_a_window_keeps_at_most_itself_and_a_block() -> None:
    """If, say, five of six groups forget what is behind their window, long requests are far smaller than they look."""
    geometry = KvGeometry(32, 1000, (KvGroup(32), KvGroup(32, 64), KvGroup(32, 64)))
    assert geometry.blocks_for_tokens(32) == 3
    assert geometry.blocks_for_tokens(96) == 3 + 3 + 3
    assert geometry.blocks_for_tokens(3200) == 100 + 3 + 3
    assert geometry.bytes_for_tokens(3200) == 106_000


def test_groups_count_their_own_blocks() -> None:
    """Layers with half as many bytes per token have twice as many tokens per block."""
    geometry = KvGeometry(64, 1000, (KvGroup(64), KvGroup(32, 64)))
    assert [geometry.blocks_for_tokens(tokens) for tokens in (1, 33, 65, 6400)] == [2, 3, 5, 103]


def test_a_state_takes_the_same_room_at_any_length() -> None:
    """A short chat of a hybrid is not small: each group of states takes a block, and two where a block ends."""
    geometry = KvGeometry(64, 1000, (KvGroup(64), *[KvGroup(64, keeps_state=True)] * 3))
    assert [geometry.blocks_for_tokens(tokens) for tokens in (0, 1, 64, 65, 6400)] == [0, 4, 4, 8, 106]


@given(st.lists(groups, min_size=1, max_size=4), st.integers(0, 1 << 20), st.integers(0, 1 << 12))
def test_more_tokens_never_take_less_room(kinds: list[KvGroup], tokens: int, more: int) -> None:
    """A request that fits at its end has fitted all along, whatever its layers keep."""
    geometry = KvGeometry(32, 1, tuple(kinds))
    assert geometry.blocks_for_tokens(tokens) <= geometry.blocks_for_tokens(tokens + more)
    assert geometry.blocks_for_tokens(1) >= len(kinds)


def test_encoder_output_takes_the_same_room_at_any_length() -> None:
    """A decoder keeps it in separate blocks beside those of its tokens."""
    geometry = KvGeometry(16, 1, encoder_tokens=150)
    assert [geometry.blocks_for_tokens(tokens) for tokens in (1, 16, 17)] == [11, 11, 12]
