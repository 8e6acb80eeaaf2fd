"""How fast a pull of many KV blocks is, beside one large copy over the same mapping: the limit of that link.

Two processes as two workers are: the peer's memory is mapped here, and read while the peer does nothing.
"""

import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing

from melld.migrate.transports import shared_memory
from melld.migrate.transports.layout import layout_of
from melld.migrate.transports.transport import KvHandle, Puller

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 4, 1024, 2, 32, 128
"""The demo model's KV on a CPU worker with 128 MiB."""


def _cache() -> list[torch.Tensor]:
    return list(torch.ones(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH).unbind(0))


def _peer(pipe: Connection) -> None:
    tensors = _cache()
    pipe.send(shared_memory.export(tensors, layout_of(tensors, BLOCKS)))
    pipe.recv()


def copy_rates(repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each size and order of blocks: GiB/s of the pull and of the large copy, and the medians' ratio."""
    torch.set_num_threads(1)
    context = torch.multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_peer, args=(theirs,), daemon=True)
    process.start()
    tensors = _cache()
    layout = layout_of(tensors, BLOCKS)
    region = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    link = shared_memory.open_link(KvHandle.decode(pipe.recv()), region, layout)
    peer = link._views[0][1].untyped_storage()  # noqa: SLF001
    their_region = torch.empty(0, dtype=torch.uint8).set_(peer)
    shuffled = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    for mib in (4, 16, 64, 128):
        blocks = (mib << 20) // layout.block_bytes
        for order, ids in (("neighbours", list(range(blocks))), ("scattered", shuffled[:blocks])):
            yield _compare(Puller(link), (region, their_region), (order, ids), blocks * layout.block_bytes, repeats)
    pipe.send("end")
    process.join()


def _compare(
    puller: Puller,
    regions: tuple[torch.Tensor, torch.Tensor],
    blocks: tuple[str, list[int]],
    nbytes: int,
    repeats: int,
) -> dict[str, Any]:
    ours, theirs = (region[:nbytes] for region in regions)
    order, ids = blocks
    pulls, copies = [], []
    for _ in range(3 * repeats + 1):
        pulls.append(puller.pull(ids, ids).copy_s)
        began_s = time.perf_counter()
        ours.copy_(theirs)
        copies.append(time.perf_counter() - began_s)
    pull_s, copy_s = statistics.median(pulls[1:]), statistics.median(copies[1:])
    return {
        "mib": nbytes >> 20,
        "blocks": order,
        "pull_gib_per_s": round(nbytes / pull_s / 2**30, 2),
        "copy_gib_per_s": round(nbytes / copy_s / 2**30, 2),
        "ratio_of_medians": round(copy_s / pull_s, 3),
        "median_of_ratios": round(statistics.median(b / a for a, b in zip(pulls[1:], copies[1:], strict=True)), 3),
    }
