"""A process with its own KV memory, for tests of the transports."""

import os
from multiprocessing.connection import Connection

import torch

from melld.migrate.transports import choose, nixl, shared_memory
from melld.migrate.transports.layout import layout_of

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 24, 2, 4, 8


def make_cache(blocks: int = BLOCKS, device: str = "cpu", order: str = "LBHNC") -> list[torch.Tensor]:
    """Return one tensor [B, H, N, C] per layer, zeros, in one allocation; block outermost with `order` "BLHNC"."""
    shape = (blocks, LAYERS) if order == "BLHNC" else (LAYERS, blocks)
    cache = torch.zeros(*shape, HEADS, TOKENS, WIDTH, device=device)
    if device == "cpu":  # where siblings can map it, as a worker has it
        cache.set_(shared_memory.allocate(cache.untyped_storage().nbytes()), 0, cache.size(), cache.stride())
    return list(cache.unbind(1 if order == "BLHNC" else 0))


def fill(tensors: list[torch.Tensor]) -> None:
    """Give every element another number, the same in every process."""
    for layer, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + layer * 1e6)


def region_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return their allocation's bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())


def sibling_main(pipe: Connection, device: str, order: str, interface: str = "") -> None:
    """Export a filled cache, to other machines with an interface, say so, and stay until told to go."""
    tensors = make_cache(device=device, order=order)
    fill(tensors)
    layout = layout_of(tensors, BLOCKS)
    if interface:
        agent = nixl.NixlAgent(region_of(tensors), layout, interface)
        handle = agent.handle
    else:
        handle = choose.export(tensors, layout)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    pipe.send((os.getpid(), handle))
    while (word := pipe.recv()) != "go":
        block, value = word
        for tensor in tensors:
            tensor[block] = value
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        pipe.send("written")
