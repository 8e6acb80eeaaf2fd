"""Run the CUDA copy kernel on CPU memory in Triton's interpreter, and compare it with plain indexing.

A process of its own: the interpreter is chosen when Triton is imported, and vLLM's CPU build must not find Triton.
"""

import itertools
import random
import sys

import torch

from melld.migrate.transports.cuda_kernel import ChunkCopier
from melld.migrate.transports.layout import layout_of

BLOCKS = 8


def cache(shape: tuple[int, ...], order: str) -> list[torch.Tensor]:
    """Return one tensor per layer, block first, of random bytes in one allocation."""
    layers, *block = shape
    lead = (BLOCKS, layers) if order == "BLHNC" else (layers, BLOCKS)
    memory = torch.randint(0, 256, (*lead, *block[:-1], block[-1] * 4), dtype=torch.uint8).view(torch.float32)
    return list(memory.unbind(1 if order == "BLHNC" else 0))


def main() -> None:
    """Try each layout with each count of blocks: one, odd, even, all."""
    chance = random.Random(1)
    torch.manual_seed(1)
    # Chunks shorter than a program's part, longer than one, whole 16-byte words and whole 8-byte words alone.
    shapes = [(3, 2, 4, 8), (2, 8, 16, 128), (5, 1, 3, 6), (1, 3, 7, 2)]
    for shape, order in itertools.product(shapes, ("LBHNC", "BLHNC")):
        source, destination = cache(shape, order), cache(shape, order)
        layouts = layout_of(source, BLOCKS), layout_of(destination, BLOCKS)
        copier = ChunkCopier(*layouts, torch.device("cpu"))
        for count in (1, 2, 3, BLOCKS):
            come_from, go_to = chance.sample(range(BLOCKS), count), chance.sample(range(BLOCKS), count)
            expected = [tensor.clone() for tensor in destination]
            for theirs, ours in zip(source, expected, strict=True):
                ours[go_to] = theirs[come_from]
            addresses = (source[0].untyped_storage().data_ptr(), destination[0].untyped_storage().data_ptr())
            copier.launch(*addresses, torch.tensor(come_from), torch.tensor(go_to))
            for ours, theirs in zip(destination, expected, strict=True):
                if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
                    sys.exit(f"{shape} {order} {count} blocks: other bytes")
            print(*shape, order, count)  # noqa: T201  the test counts these
