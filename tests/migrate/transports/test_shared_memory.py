"""CPU devices: a sibling's blocks are read from its own memory."""

import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from melld.migrate.transports import choose, shared_memory
from melld.migrate.transports.layout import KvLayout, layout_of
from melld.migrate.transports.transport import (
    ChecksumMismatch,
    KvHandle,
    Pacer,
    Puller,
    TransportFailed,
    Wait,
    handle_of,
)
from tests.migrate.transports.other_process import Sibling
from tests.migrate.transports.sibling import BLOCKS, fill, make_cache


@pytest.fixture(scope="module")
def sibling() -> Iterator[Sibling]:
    other = Sibling()
    yield other
    other.kill()


def ours(blocks: int = BLOCKS) -> tuple[list[torch.Tensor], KvLayout, torch.Tensor]:
    tensors = make_cache(blocks)
    return tensors, layout_of(tensors, blocks), torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())


def link_to(handle: bytes, region: torch.Tensor, layout: KvLayout) -> shared_memory.SharedMemoryLink:
    return shared_memory.open_link(msgspec.msgpack.decode(handle, type=KvHandle), region, layout)


@pytest.mark.parametrize("checksum", [False, True])
def test_pulled_blocks_equal_the_sibling_s(sibling: Sibling, checksum: bool) -> None:
    """Every layer of every requested block arrives at its place, and nothing else changes."""
    tensors, layout, region = ours(30)
    source, target = [3, 4, 5, 9, 1, 20], [7, 8, 9, 2, 29, 0]
    pulled = Puller(link_to(sibling.handle, region, layout), checksum=checksum, piece_bytes=1000).pull(source, target)
    reference = make_cache()
    fill(reference)
    for mine, theirs in zip(tensors, reference, strict=True):
        assert torch.equal(mine[target], theirs[source])
        mine[target] = 0
        assert not mine.any()
    assert (pulled.blocks, pulled.nbytes) == (6, 6 * layout.block_bytes)


def test_a_pull_sees_the_sibling_s_latest_writes(sibling: Sibling) -> None:
    """The memory is the sibling's own, not an old copy of it."""
    tensors, layout, region = ours()
    puller = Puller(link_to(sibling.handle, region, layout))
    for value in (1.5, 2.5):
        sibling.write(23, value)
        puller.pull([23], [0])
        assert all((tensor[0] == value).all() for tensor in tensors)


class _Garbler(shared_memory.SharedMemoryLink):
    """A link that gets one byte wrong."""

    spoilt: int

    def begin(self, source_blocks: object, destination_blocks: object) -> Wait:
        landed = super().begin(source_blocks, destination_blocks)  # type: ignore[arg-type]
        self.region.view(torch.uint8)[self.spoilt] ^= 1
        return landed


def test_the_checksum_finds_a_wrong_byte(sibling: Sibling) -> None:
    """With checksums on, a request never decodes from bytes that are not its own."""
    _, layout, region = ours()
    good = link_to(sibling.handle, region, layout)
    link = _Garbler.__new__(_Garbler)
    link.__dict__ |= good.__dict__ | {"region": region, "spoilt": layout.chunk_offsets[1] + layout.block_stride_bytes}
    Puller(link, checksum=True).pull([4], [2])  # the wrong byte is in another block
    with pytest.raises(ChecksumMismatch):
        Puller(link, checksum=True).pull([4], [1])


class _Late(shared_memory.SharedMemoryLink):
    """A link that copies in its wait, as a device does, out of memory of its own that is gone once it is freed."""

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        here = weakref.ref(self)

        def wait() -> None:
            link = here()
            assert link is not None, "the link is freed while it copies"
            super(_Late, link).begin(source_blocks, destination_blocks)()

        return wait

    def into(self, region: torch.Tensor, layout: KvLayout) -> "_Late":
        return _Late(self._peer, self.source, region, layout)


def test_a_link_lives_until_its_copy_has_ended(sibling: Sibling) -> None:
    """The check's second reading must not be written to memory that another copy has been given meanwhile."""
    _, layout, region = ours()
    good = link_to(sibling.handle, region, layout)
    link = _Late(good._peer, good.source, region, layout)
    assert Puller(link, checksum=True, piece_bytes=layout.block_bytes).pull([4, 5], [1, 2]).blocks == 2


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [([1, 2], [1], "2 blocks for 1"), ([BLOCKS], [1], "outside"), ([-1], [1], "outside"), ([1, 2], [3, 3], "twice")],
)
def test_impossible_pulls_are_refused(sibling: Sibling, source: list[int], target: list[int], why: str) -> None:
    """A wrong id must not write past a region, nor two blocks over each other."""
    _, layout, region = ours()
    with pytest.raises(TransportFailed, match=why):
        Puller(link_to(sibling.handle, region, layout)).pull(source, target)


def test_a_rate_limit_holds_over_pieces(sibling: Sibling) -> None:
    """A rate-limited link leaves bandwidth to others, to within a piece."""
    _, layout, region = ours()
    rate = 20 * layout.block_bytes / 0.1
    puller = Puller(link_to(sibling.handle, region, layout), bytes_per_s=rate, piece_bytes=layout.block_bytes)
    began_s = time.monotonic()
    pulled = puller.pull(list(range(20)), list(range(20)))
    assert time.monotonic() - began_s >= 0.095
    assert pulled.paced_s > 0.0


def test_an_unpaced_copy_does_not_wait_but_is_booked(sibling: Sibling) -> None:
    """A frozen request's last blocks go at once; the limit holds over the link's time all the same."""
    _, layout, region = ours()
    puller = Puller(link_to(sibling.handle, region, layout), bytes_per_s=layout.block_bytes / 0.2)
    began_s = time.monotonic()
    assert puller.pull([0, 1, 2], [0, 1, 2], paced=False).paced_s == 0.0
    puller.pull([3], [3])
    assert time.monotonic() - began_s >= 0.6


def test_a_pull_keeps_to_its_own_limit(sibling: Sibling) -> None:
    """A move larger than its path's epoch budget is spread over several epochs, even on a link without limit."""
    _, layout, region = ours()
    rate = 20 * layout.block_bytes / 0.1
    puller = Puller(link_to(sibling.handle, region, layout))
    began_s = time.monotonic()
    assert puller.pull(list(range(20)), list(range(20)), bytes_per_s=rate).paced_s > 0.0
    assert time.monotonic() - began_s >= 0.06
    assert puller.pull(list(range(20)), list(range(20))).paced_s == 0.0


def test_no_limit_means_no_wait() -> None:
    """The default costs nothing."""
    pacer = Pacer(None)
    pacer.book(1 << 40)
    assert pacer.wait_s() == 0.0


def files_of_memory() -> set[Path]:
    """Return the files in shared memory, except semaphores, which other test processes make and drop."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}  # noqa: S108


def test_a_dead_sibling_s_memory_is_gone_and_leaves_nothing_behind() -> None:
    """`kill -9` of a worker leaks no memory file, and its handle is refused with a clear message."""
    before = files_of_memory()
    other = Sibling()
    _, layout, region = ours()
    mapped = link_to(other.handle, region, layout)
    other.kill()
    with pytest.raises(TransportFailed, match="cannot open"):
        link_to(other.handle, region, layout)
    mapped.begin([0], [0])()  # what is mapped stays readable until it is closed: a late reader does not crash
    mapped.close()
    assert before == files_of_memory()


def test_a_process_with_a_recycled_pid_is_not_taken_for_the_sibling(sibling: Sibling) -> None:
    """Process numbers come again; memory is identified by more than that."""
    import msgspec

    handle = msgspec.msgpack.decode(sibling.handle, type=KvHandle)
    where = msgspec.msgpack.decode(handle.where)
    forged = msgspec.structs.replace(handle, where=msgspec.msgpack.encode(where | {"inode": where["inode"] + 1}))
    _, layout, region = ours()
    with pytest.raises(TransportFailed, match="another process"):
        shared_memory.open_link(forged, region, layout)


def test_blocks_of_another_shape_are_refused(sibling: Sibling) -> None:
    """Two workers with different models, or block sizes, do not exchange blocks."""
    tensors = make_cache(order="BLHNC")
    region = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    with pytest.raises(TransportFailed, match="differ"):
        link_to(sibling.handle, region, layout_of(tensors, BLOCKS))


def test_memory_that_no_sibling_could_map_is_refused() -> None:
    """Its requests then move by tokens."""
    tensors = [torch.zeros_like(tensor) for tensor in make_cache()]
    with pytest.raises(TransportFailed, match="that can be shared"):
        shared_memory.export(tensors[:1], layout_of(make_cache(), BLOCKS))


def test_the_best_way_is_found_by_trying(sibling: Sibling) -> None:
    """A worker asks for a link and gets one that has been seen to work, with its rate."""
    tensors, layout, region = ours()
    opened = choose.open_best(sibling.handle, region, layout, scratch=[1, 2, 3])
    assert opened.transport == "shared_memory"
    assert opened.bytes_per_s > 0
    assert all(tensor[1:4].any() for tensor in tensors)
    unknown = handle_of("carrier pigeon", layout, b"")
    with pytest.raises(TransportFailed, match="unknown"):
        choose.open_best(unknown, region, layout, scratch=[])
