"""Layout of KV blocks in memory, read from the tensors' shapes and strides, never from a layout's name.

Arithmetic alone; copies nothing.

A block has one run of `chunk_bytes` per entry of `chunk_offsets`, at `offset + block * block_stride_bytes`:

    layers outermost (LBHNC, LBNHC)   one chunk per layer, far apart          |K0 V0 ...|K0 V0 ...|
    blocks outermost (BLHNC)          all layers of a block are one chunk     |all of 0|all of 1|...
                                      (also layers of different sizes: latent attention with its indexer)
    heads outside of blocks (LHBNC)   one chunk per layer and head
"""

import itertools
from collections.abc import Sequence

import msgspec
import torch


class UnsupportedLayout(ValueError):
    """No single stride describes the tensors' blocks; the message says why."""


class KvLayout(msgspec.Struct, frozen=True):
    """Place of every block in one allocation of `region_bytes`."""

    num_blocks: int
    chunk_bytes: int
    block_stride_bytes: int
    chunk_offsets: tuple[int, ...]
    region_bytes: int

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block of all layers."""
        return self.chunk_bytes * len(self.chunk_offsets)

    def fits(self, other: "KvLayout") -> bool:
        """Return True if both layouts' blocks have the same chunks, wherever each lies."""
        return (self.chunk_bytes, len(self.chunk_offsets)) == (other.chunk_bytes, len(other.chunk_offsets))

    @property
    def even_step(self) -> int | None:
        """Return the distance between neighbouring chunks if all have the same (0 for a single chunk), else None."""
        steps = {b - a for a, b in itertools.pairwise(self.chunk_offsets)}
        return steps.pop() if len(steps) == 1 else (None if steps else 0)


def layout_of(tensors: Sequence[torch.Tensor], num_blocks: int) -> KvLayout:
    """Return the layout of one engine's KV cache tensors (one per layer, block first in the logical shape).

    A tensor may have a multiple of `num_blocks` entries, where the attention kernel splits blocks into smaller ones.

    Raises:
        UnsupportedLayout: the tensors are not in one allocation, or their blocks differ in shape.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) != 1:
        raise UnsupportedLayout(f"the KV cache is {len(storages)} allocations, not one")
    found = {_chunks(tensor, num_blocks) for tensor in tensors}
    strides = {stride for _, stride, _ in found}
    if len(strides) != 1:
        raise UnsupportedLayout(f"the layers' blocks lie {sorted(strides)} bytes apart: they are not of one size")
    stride = strides.pop()
    offsets = sorted({offset for _, _, offsets in found for offset in offsets})  # groups of layers may share bytes
    ends = max(offset + chunk for chunk, _, offsets in found for offset in offsets)
    if ends - offsets[0] <= stride:  # blocks outermost: all layers of a block lie together, of whatever size each is
        chunk, offsets = ends - offsets[0], offsets[:1]
    else:  # a state may fill less of its place than KV does, and the rest is padding: as wide as the widest
        chunk = max(chunk for chunk, _, _ in found)
    region_bytes = tensors[0].untyped_storage().nbytes()
    layout = KvLayout(num_blocks, chunk, stride, tuple(offsets), region_bytes)
    if len({chunk for chunk, _, _ in found}) > 1 and not _is_padded(layout):
        raise UnsupportedLayout("the layers' blocks are not of one shape")
    return layout


def _is_padded(layout: KvLayout) -> bool:
    """Return True if the layout's chunks do not overlap, wherever they are wider than what a layer keeps there."""
    last_block = (layout.num_blocks - 1) * layout.block_stride_bytes
    ends = (*layout.chunk_offsets[1:], layout.region_bytes)
    return layout.chunk_bytes <= layout.block_stride_bytes and all(
        offset + last_block + layout.chunk_bytes <= end for offset, end in zip(layout.chunk_offsets, ends, strict=True)
    )


def _chunks(tensor: torch.Tensor, num_blocks: int) -> tuple[int, int, tuple[int, ...]]:
    """Return one layer's chunk size, block stride and offsets of block 0's chunks, in bytes."""
    if tensor.shape[0] % num_blocks:
        raise UnsupportedLayout(f"{tensor.shape[0]} entries do not make {num_blocks} blocks")
    size = tensor.element_size()
    dims = [(tensor.stride(dim), tensor.shape[dim]) for dim in range(1, tensor.dim()) if tensor.shape[dim] > 1]
    split = tensor.shape[0] // num_blocks
    if split > 1:
        dims.append((tensor.stride(0), split))
    block_stride = tensor.stride(0) * split
    dense = 1
    outer: list[tuple[int, int]] = []
    for stride, length in sorted(dims):
        if stride == dense and dense * length <= block_stride:
            dense *= length
        else:
            outer.append((stride, length))
    steps = [[stride * index for index in range(length)] for stride, length in outer]
    base = tensor.storage_offset()
    offsets = tuple(size * (base + sum(combination)) for combination in itertools.product(*steps))
    return dense * size, block_stride * size, offsets


def paired_views(
    ours: torch.Tensor, layout: KvLayout, theirs: torch.Tensor, their_layout: KvLayout
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return views [chunks, blocks, chunk] of two regions (uint8) that differ only in the number of blocks.

    Words are as wide as the alignment of both allows.  One pair if the chunks are evenly spaced on both sides, else
    one per chunk.
    """
    word = min(_word(layout), _word(their_layout))
    even = layout.even_step is not None and their_layout.even_step is not None
    return list(zip(_views(ours, layout, word, even), _views(theirs, their_layout, word, even), strict=True))


def packed_layout(layout: KvLayout, num_blocks: int) -> KvLayout:
    """Return the layout of blocks with the same chunks, packed without gaps."""
    offsets = tuple(layout.chunk_bytes * chunk for chunk in range(len(layout.chunk_offsets)))
    nbytes = layout.block_bytes
    return KvLayout(num_blocks, layout.chunk_bytes, nbytes, offsets, nbytes * num_blocks)


def _word(layout: KvLayout) -> int:
    word = 8
    while any(n % word for n in (layout.chunk_bytes, layout.block_stride_bytes, *layout.chunk_offsets)):
        word //= 2
    return word


def _views(region: torch.Tensor, layout: KvLayout, word: int, even: bool) -> list[torch.Tensor]:
    words = region[: region.numel() // word * word].view(_WORDS[word])
    blocks, stride, chunk = layout.num_blocks, layout.block_stride_bytes // word, layout.chunk_bytes // word
    offsets = [offset // word for offset in layout.chunk_offsets]
    if even:
        step = (layout.even_step or 0) // word
        return [words.as_strided((len(offsets), blocks, chunk), (step, stride, 1), offsets[0])]
    return [words.as_strided((1, blocks, chunk), (0, stride, 1), offset) for offset in offsets]


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
