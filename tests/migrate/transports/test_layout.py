"""Where a block's bytes lie, read from strides alone."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from melld.migrate.transports.layout import UnsupportedLayout, layout_of, packed_layout, paired_views

DIMENSIONS = "LBHNC"  # layer, block, head, token of a block, keys and values


def cache(order: str, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return one [B, H, N, C] tensor per layer, in one allocation with dimensions in `order`, outermost first."""
    whole = torch.arange(torch.tensor([sizes[d] for d in order]).prod(), dtype=torch.float64).to(dtype)
    stacked = whole.view([sizes[d] for d in order]).permute([order.index(d) for d in DIMENSIONS])
    return list(stacked.unbind(0))


def region(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())


orders = st.permutations(DIMENSIONS).map("".join)
shapes = st.fixed_dictionaries({d: st.integers(1, 4) for d in "LBHN"} | {"C": st.integers(1, 3)})


@given(orders, shapes, st.sampled_from([torch.float32, torch.float16, torch.uint8]), st.data())
def test_copying_a_block_copies_exactly_that_block_of_every_layer(
    order: str, sizes: dict[str, int], dtype: torch.dtype, data: st.DataObject
) -> None:
    """With any kernel's layout, a pull copies whole blocks, and only the requested ones."""
    source, target = cache(order, sizes, dtype), cache(order, sizes | {"B": sizes["B"] + 2}, dtype)
    for tensor in target:
        tensor.zero_()
    ours, theirs = layout_of(target, sizes["B"] + 2), layout_of(source, sizes["B"])
    assert ours.fits(theirs)
    here, there = data.draw(st.integers(0, sizes["B"] + 1)), data.draw(st.integers(0, sizes["B"] - 1))
    for mine, peers in paired_views(region(target), ours, region(source), theirs):
        mine[:, here] = peers[:, there]
    for mine_layer, peer_layer in zip(target, source, strict=True):
        assert torch.equal(mine_layer[here], peer_layer[there])
        others = [index for index in range(sizes["B"] + 2) if index != here]
        assert not mine_layer[others].any()


def test_block_outermost_is_one_chunk() -> None:
    """Where all layers of a block are adjacent, a block is one copy."""
    sizes = {"L": 4, "B": 8, "H": 2, "N": 16, "C": 32}
    assert layout_of(cache("BLHNC", sizes), 8).chunk_offsets == (0,)
    assert layout_of(cache("LBHNC", sizes), 8).chunk_bytes == 2 * 16 * 32 * 4
    assert len(layout_of(cache("LHBNC", sizes), 8).chunk_offsets) == 4 * 2


def test_adjacent_layers_of_different_sizes_are_one_chunk() -> None:
    """Latent attention has an indexer's small pages beside its own in each block."""
    whole = torch.arange(5 * 24, dtype=torch.float32)
    latent, indexer = (whole.as_strided((5, size), (24, 1), at) for size, at in ((16, 0), (4, 16)))
    layout = layout_of([latent, indexer], 5)
    assert (layout.chunk_bytes, layout.block_stride_bytes, layout.chunk_offsets) == (20 * 4, 24 * 4, (0,))


def test_blocks_that_the_kernel_splits_are_copied_whole() -> None:
    """An attention kernel may see a block of 32 tokens as two of 16."""
    sizes = {"L": 2, "B": 6, "H": 2, "N": 16, "C": 4}
    layout = layout_of(cache("LBHNC", sizes), 3)
    assert (layout.num_blocks, layout.block_bytes) == (3, 2 * 2 * 2 * 16 * 4 * 4)


def test_layers_that_share_their_bytes_are_copied_once() -> None:
    """Groups of layers may overlap in one allocation, with blocks of one pool."""
    tensors = cache("LBHNC", {"L": 2, "B": 6, "H": 2, "N": 16, "C": 4})
    assert layout_of(tensors, 6) == layout_of([*tensors, *tensors], 6)


def test_a_packed_layout_has_the_same_chunks() -> None:
    """Staging buffers hold blocks without gaps."""
    layout = layout_of(cache("LBHNC", {"L": 3, "B": 5, "H": 2, "N": 4, "C": 8}), 5)
    packed = packed_layout(layout, 2)
    assert packed.fits(layout)
    assert packed.region_bytes == 2 * layout.block_bytes


def test_a_layer_with_padding_is_copied_with_the_rest() -> None:
    """A state is smaller than a block's keys and values, and is padded: even alone, or at the very end."""
    whole = torch.zeros(24)
    first, last = (whole.as_strided((3, 4), (4, 1), place) for place in (0, 12))
    small_first, small_last = (whole.as_strided((3, 2), (4, 1), place) for place in (0, 12))
    both = layout_of([first, last], 3)
    for tensors in ([small_first, last], [first, small_last], [small_first, first, last]):
        assert layout_of(tensors, 3) == both


def test_caches_that_one_stride_cannot_describe_are_refused() -> None:
    """Then requests move by their tokens; nothing is copied to a wrong place."""
    first, second = torch.zeros(4, 2), torch.zeros(4, 2)
    with pytest.raises(UnsupportedLayout, match="2 allocations"):
        layout_of([first, second], 4)
    whole = torch.zeros(24)
    with pytest.raises(UnsupportedLayout, match=r"\[8, 16\] bytes apart"):
        layout_of([whole[:8].view(4, 2), whole[8:].view(4, 4)], 4)
    between = [whole.as_strided((3, width), (4, 1), first) for width, first in ((2, 0), (1, 2), (2, 12))]
    with pytest.raises(UnsupportedLayout, match="not of one shape"):
        layout_of(between, 3)
    with pytest.raises(UnsupportedLayout, match="do not make"):
        layout_of([first], 3)
