"""How fast a pull of many KV blocks is, beside one large copy over the same mapping: the limit of that link.

Two processes as two workers are: the peer's memory is mapped here, and read while the peer does nothing.  On a GPU both
are on one device, each way of copying by itself.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch
import torch.multiprocessing

from melld.migrate.transports import choose, shared_memory
from melld.migrate.transports.layout import KvLayout, layout_of
from melld.migrate.transports.transport import KvHandle, Link, Puller

SHAPES = {"cpu": (4, 1024, 2, 32, 128), "cuda": (32, 2048, 8, 16, 256)}
"""Layers, blocks, heads, tokens and width of a block: the demo model's on a CPU worker, and Llama 3.1 8B's in bf16."""
SIZES_MIB = {"cpu": (4, 16, 64, 128), "cuda": (16, 64, 256, 1024, 4096)}


@dataclass(frozen=True)
class Ours:
    """KV memory of this process."""

    layout: KvLayout
    region: torch.Tensor

    @classmethod
    def make(cls, kind: str) -> "tuple[Ours, list[torch.Tensor]]":
        """Memory of this kind of device, and its tensors."""
        dtype = torch.float32 if kind == "cpu" else torch.bfloat16
        whole = torch.empty(0, dtype=dtype, device=kind)
        if kind == "cpu":  # as a worker's, which siblings can map
            whole.set_(shared_memory.allocate(math.prod(SHAPES[kind]) * dtype.itemsize))
        tensors = list(whole.resize_(SHAPES[kind]).fill_(1).unbind(0))
        region = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())
        return cls(layout_of(tensors, SHAPES[kind][1]), region), tensors


def _peer(pipe: Connection, kind: str) -> None:
    ours, tensors = Ours.make(kind)
    pipe.send(choose.export(tensors, ours.layout))
    pipe.recv()


def copy_rates(kind: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Return a row for each way, size and order of blocks: GiB/s of pull and large copy, and the medians' ratio."""
    torch.set_num_threads(1)
    context = torch.multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_peer, args=(theirs, kind), daemon=True)
    process.start()
    ours, _ = Ours.make(kind)
    handle = msgspec.msgpack.decode(pipe.recv(), type=KvHandle)
    ids = torch.randperm(ours.layout.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    for way, link, plain in (_on_cpu if kind == "cpu" else _on_gpu)(handle, ours):
        with contextlib.closing(link):
            for mib in SIZES_MIB[kind]:
                blocks = (mib << 20) // ours.layout.block_bytes
                for order, named in (("neighbours", list(range(blocks))), ("scattered", ids[:blocks])):
                    rates = _compare(Puller(link), plain, named, blocks * ours.layout.block_bytes, repeats)
                    yield {"way": way, "mib": mib, "blocks": order, **rates}
    pipe.send("end")
    process.join()


Plain = Callable[[int], None]
"""One large copy of so many bytes over the mapping; returns when they are there."""


def _on_cpu(handle: KvHandle, ours: Ours) -> Iterator[tuple[str, Link, Plain]]:
    link = shared_memory.open_link(handle, ours.region, ours.layout)
    peer = link._peer  # noqa: SLF001

    def plain(nbytes: int) -> None:
        ours.region[:nbytes].copy_(peer[:nbytes])

    yield shared_memory.NAME, link, plain


def _on_gpu(handle: KvHandle, ours: Ours) -> Iterator[tuple[str, Link, Plain]]:
    from melld.migrate.transports import cuda_peer, cuda_runtime, cuda_staged

    link = cuda_peer.open_link(handle, ours.region, ours.layout)

    def plain(nbytes: int) -> None:
        stream = torch.cuda.Stream()
        peer = link._peer  # noqa: SLF001
        here, there = (np.array([address], dtype=np.uint64) for address in (ours.region.data_ptr(), peer))
        cuda_runtime.copy_batch(here, there, nbytes, stream)
        cuda_runtime.end_of(stream)()

    yield cuda_peer.NAME, link, plain
    if cuda_runtime.batch_copies_supported():
        yield cuda_staged.NAME, cuda_staged.open_link(handle, ours.region, ours.layout), plain


def _compare(puller: Puller, plain: Plain, ids: list[int], nbytes: int, repeats: int) -> dict[str, Any]:
    pulls, copies = [], []
    for _ in range(3 * repeats + 1):
        pulls.append(puller.pull(ids, ids).copy_s)
        began_s = time.perf_counter()
        plain(nbytes)
        copies.append(time.perf_counter() - began_s)
    pull_s, copy_s = statistics.median(pulls[1:]), statistics.median(copies[1:])
    return {
        "pull_gib_per_s": round(nbytes / pull_s / 2**30, 2),
        "copy_gib_per_s": round(nbytes / copy_s / 2**30, 2),
        "ratio_of_medians": round(copy_s / pull_s, 3),
        "median_of_ratios": round(statistics.median(b / a for a, b in zip(pulls[1:], copies[1:], strict=True)), 3),
    }
