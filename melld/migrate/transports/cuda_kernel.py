"""Triton kernel that copies all blocks of all layers of a request in one launch.

The kernel reads wherever the device can read: its own memory, or a peer's over NVLink or PCIe.

    grid: (pair of blocks, chunk of a block, part of a chunk);  each program moves `WORDS` words of 16 bytes' alignment
"""

import torch
import triton
import triton.language as tl

from melld.migrate.transports.layout import KvLayout

WORDS_PER_PROGRAM = 2048  # of 8 bytes: 16 KiB


# Specialise nothing by value: else a copy of one block, of an odd number or at an odd address would be recompiled while
# a client waits.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["source", "destination", "source_stride", "destination_stride", "chunk_words"],
    do_not_specialize_on_alignment=[
        "source_blocks",
        "destination_blocks",
        "source_offsets",
        "destination_offsets",
    ],
)
def _copy_chunks(  # type: ignore[no-untyped-def]  # Triton refuses annotations
    source,
    destination,
    source_blocks,
    destination_blocks,
    source_offsets,
    destination_offsets,
    source_stride,
    destination_stride,
    chunk_words,
    WORDS: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
) -> None:
    """Copy chunk `program_id(1)` of block pair `program_id(0)`; offsets and strides are in 8-byte words.

    `WIDE`: all of them are whole 16-byte words, which a thread moves at once.
    """
    pair, chunk, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    come_from = tl.load(source_blocks + pair) * source_stride + tl.load(source_offsets + chunk)
    go_to = tl.load(destination_blocks + pair) * destination_stride + tl.load(destination_offsets + chunk)
    if WIDE:
        come_from, go_to = tl.multiple_of(come_from, 2), tl.multiple_of(go_to, 2)
        source, destination = tl.multiple_of(source, 16), tl.multiple_of(destination, 16)
        chunk_words = tl.multiple_of(chunk_words, 2)
    word = part * WORDS + tl.arange(0, WORDS)
    there = word < chunk_words
    reading = source.to(tl.pointer_type(tl.int64)) + come_from + word
    writing = destination.to(tl.pointer_type(tl.int64)) + go_to + word
    tl.store(writing, tl.load(reading, mask=there), mask=there)


class ChunkCopier:
    """Launcher of the kernel for two layouts, whose numbers are on the device."""

    def __init__(self, source: KvLayout, destination: KvLayout, device: torch.device) -> None:
        """Prepare for layouts whose chunks, strides and offsets are whole 8-byte words (see `applicable`)."""
        self._device = device
        self._source_stride = source.block_stride_bytes // 8
        self._destination_stride = destination.block_stride_bytes // 8
        self._source_offsets = self._words(source.chunk_offsets)
        self._destination_offsets = self._words(destination.chunk_offsets)
        self._chunk_words = source.chunk_bytes // 8
        self._chunks = len(source.chunk_offsets)
        self._is_wide = _are_whole(16, source) and _are_whole(16, destination)

    @staticmethod
    def applicable(layout: KvLayout) -> bool:
        """Return True if the layout is aligned to 8-byte words."""
        return _are_whole(8, layout)

    def launch(
        self, source: int, destination: int, source_blocks: torch.Tensor, destination_blocks: torch.Tensor
    ) -> None:
        """Enqueue the copy on the current stream.  Addresses of the two regions; block ids as int64 on the device."""
        grid = (len(source_blocks), self._chunks, triton.cdiv(self._chunk_words, WORDS_PER_PROGRAM))
        _copy_chunks[grid](
            source,
            destination,
            source_blocks,
            destination_blocks,
            self._source_offsets,
            self._destination_offsets,
            self._source_stride,
            self._destination_stride,
            self._chunk_words,
            WORDS=WORDS_PER_PROGRAM,
            WIDE=self._is_wide and source % 16 == 0 and destination % 16 == 0,
            num_warps=8,
        )

    def _words(self, offsets: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([offset // 8 for offset in offsets], dtype=torch.int64, device=self._device)


def _are_whole(nbytes: int, layout: KvLayout) -> bool:
    return all(n % nbytes == 0 for n in (layout.chunk_bytes, layout.block_stride_bytes, *layout.chunk_offsets))
