"""CUDA transports on a real device: two processes on one GPU, and on two GPUs if there are two."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.multiprocessing

from melld.migrate.transports.layout import KvLayout, layout_of
from melld.migrate.transports.transport import KvHandle, Puller, TransportFailed
from tests.gpu.conftest import DEVICE
from tests.migrate.transports.sibling import BLOCKS, fill, make_cache, sibling_main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda", reason="CUDA's own transports"),
]


class Sibling:
    """A process with a filled cache on a device."""

    def __init__(self, device: str = "cuda:0", order: str = "LBHNC") -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=sibling_main, args=(theirs, device, order), daemon=True)
        self.process.start()
        theirs.close()
        self.pid, self.handle = self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()


@pytest.fixture(params=["LBHNC", "BLHNC"])
def sibling(request: pytest.FixtureRequest) -> Iterator[Sibling]:
    other = Sibling(order=request.param)
    other.order = request.param  # type: ignore[attr-defined]
    yield other
    other.kill()


def ours(order: str, device: str = "cuda:0") -> tuple[list[torch.Tensor], KvLayout, torch.Tensor]:
    tensors = make_cache(device=device, order=order)
    region = torch.empty(0, dtype=torch.uint8, device=device).set_(tensors[0].untyped_storage())
    return tensors, layout_of(tensors, BLOCKS), region


def assert_pulled(tensors: list[torch.Tensor], order: str, source: list[int], target: list[int]) -> None:
    reference = make_cache(order=order)
    fill(reference)
    for mine, theirs in zip(tensors, reference, strict=True):
        assert torch.equal(mine[target].cpu(), theirs[source])
        mine[target] = 0
        assert not mine.any()


SOURCE, TARGET = [3, 4, 5, 9, 1, 20], [7, 8, 9, 2, 23, 0]


def test_peer_copies_are_exact(sibling: Any) -> None:
    """All layers of all blocks, by one launch, and nothing beside them."""
    from melld.migrate.transports import cuda_peer

    tensors, layout, region = ours(sibling.order)
    link = cuda_peer.open_link(msgspec.msgpack.decode(sibling.handle, type=KvHandle), region, layout)
    Puller(link, checksum=True).pull(SOURCE, TARGET)
    assert_pulled(tensors, sibling.order, SOURCE, TARGET)
    link.close()


def test_a_peer_that_delivers_wrong_bytes_is_refused(sibling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are never taken over a link that did not deliver the peer's canary."""
    from melld.migrate.transports import cuda_canary, cuda_peer

    _, layout, region = ours(sibling.order)
    monkeypatch.setattr(cuda_canary, "pattern", lambda _: torch.zeros(cuda_canary.LAYOUT.region_bytes))
    with pytest.raises(TransportFailed, match="different bytes from the peer's"):
        cuda_peer.open_link(msgspec.msgpack.decode(sibling.handle, type=KvHandle), region, layout)


def test_staged_copies_are_exact(sibling: Any) -> None:
    """Cards without peer access get the same bytes through pinned memory."""
    from melld.migrate.transports import cuda_runtime, cuda_staged

    if not cuda_runtime.batch_copies_supported():
        pytest.skip("no batched copies with this CUDA runtime")
    tensors, layout, region = ours(sibling.order)
    link = cuda_staged.open_link(msgspec.msgpack.decode(sibling.handle, type=KvHandle), region, layout)
    Puller(link, checksum=True).pull(SOURCE, TARGET)
    assert_pulled(tensors, sibling.order, SOURCE, TARGET)
    link.close()


def test_two_devices_are_matched_by_uuid() -> None:
    """A peer's `cuda:0` is not ours: its UUID says which device it is."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    from melld.migrate.transports import choose

    other = Sibling("cuda:1")
    tensors, layout, region = ours("LBHNC")
    opened = choose.open_best(other.handle, region, layout, scratch=[1, 2])
    for tensor in tensors:
        tensor.zero_()
    Puller(opened.link, checksum=True).pull(SOURCE, TARGET)
    assert_pulled(tensors, "LBHNC", SOURCE, TARGET)
    opened.link.close()
    other.kill()


def test_a_dead_sibling_s_handle_is_refused() -> None:
    """A killed worker causes a clear error, not a crash of its peers."""
    from melld.migrate.transports import cuda_peer

    other = Sibling()
    other.kill()
    _, layout, region = ours("LBHNC")
    with pytest.raises(TransportFailed):
        cuda_peer.open_link(msgspec.msgpack.decode(other.handle, type=KvHandle), region, layout)


def test_the_fused_copy_is_near_one_large_copy(record_property: Any) -> None:
    """Scattered blocks cost at most a quarter more than one plain copy of as many bytes, within one device."""
    from melld.migrate.transports.cuda_kernel import ChunkCopier

    layers, blocks = 32, 512  # chunks of 64 KiB; 256 of the blocks are 512 MiB
    caches = [list(torch.zeros(layers, blocks, 8, 16, 128, device="cuda").unbind(0)) for _ in range(2)]
    layouts = [layout_of(tensors, blocks) for tensors in caches]
    ids = [torch.randperm(blocks, device="cuda")[:256] for _ in range(2)]
    copier = ChunkCopier(layouts[0], layouts[1], torch.device("cuda"))
    addresses = [tensors[0].untyped_storage().data_ptr() for tensors in caches]
    plain = [torch.empty(256 * layouts[0].block_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    fused_ms = _milliseconds(lambda: copier.launch(*addresses, *ids))
    plain_ms = _milliseconds(lambda: plain[1].copy_(plain[0]))
    record_property("fused_ms", fused_ms)
    record_property("plain_ms", plain_ms)
    assert fused_ms <= plain_ms / 0.8


def _milliseconds(work: Any, repeats: int = 10) -> float:
    work()
    times = []
    for _ in range(repeats):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return sorted(times)[repeats // 2]
