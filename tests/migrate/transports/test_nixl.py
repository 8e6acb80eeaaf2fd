"""Between machines: a process's blocks are read from its memory over TCP, whatever becomes of that process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from melld.migrate.transports import choose, nixl
from melld.migrate.transports.layout import layout_of
from melld.migrate.transports.nixl import NixlAgent
from melld.migrate.transports.transport import LinkBroken, Puller, TransportFailed
from tests.forked import ROOT
from tests.migrate.transports.other_process import Sibling
from tests.migrate.transports.sibling import BLOCKS, fill, make_cache, region_of

pytest.importorskip("nixl", reason="NIXL is not installed: locks/nixl.txt")
SOURCE, TARGET = [3, 4, 5, 9, 1, 20], [7, 8, 9, 2, 23, 0]


class Peer(Sibling):
    """A process on another machine."""

    def __init__(self, order: str = "LBHNC") -> None:
        super().__init__(order, "lo")

    def freeze(self) -> None:
        """Stop every thread of it."""
        os.kill(self.pid, signal.SIGSTOP)
        while {
            line.read_text().rpartition(")")[2].split()[0] for line in Path(f"/proc/{self.pid}/task").glob("*/stat")
        } != {"T"}:
            pass


class Ours:
    """A cache of zeros, and its agent."""

    def __init__(self, order: str = "LBHNC", blocks: int = BLOCKS, interface: str = "lo") -> None:
        self.tensors = make_cache(blocks, order=order)
        self.layout = layout_of(self.tensors, blocks)
        self.region = region_of(self.tensors)
        self.agent = NixlAgent(self.region, self.layout, interface)

    def link(self, handle: bytes) -> choose.OpenedLink:
        """Return a link that has been seen to work; the trial overwrites block 0."""
        opened = choose.open_best(handle, self.region, self.layout, [0], self.agent)
        self.region.zero_()
        return opened


@pytest.fixture(scope="module", autouse=True)
def _as_on_two_machines() -> Iterator[None]:
    """Disable the ways that UCX has between processes of one machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.kill()


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_pulled_blocks_equal_the_peer_s(order: str) -> None:
    """Every layer of every requested block arrives at its place, and nothing else changes."""
    there, here = Peer(order), Ours(order, 30)
    opened = here.link(there.handle)
    assert opened.transport == "nixl"
    assert opened.bytes_per_s > 0
    for checksum in (False, True):
        pulled = Puller(opened.link, checksum=checksum).pull(SOURCE, TARGET)
        assert (pulled.blocks, pulled.nbytes) == (6, 6 * here.layout.block_bytes)
        reference = make_cache(order=order)
        fill(reference)
        for mine, theirs in zip(here.tensors, reference, strict=True):
            assert torch.equal(mine[TARGET], theirs[SOURCE])
            mine[TARGET] = 0
            assert not mine.any()
    there.kill()


def test_the_checksum_finds_a_wrong_byte(peer: Peer) -> None:
    """The source is read once more, and compared with what was placed."""
    here = Ours()
    link = here.link(peer.handle).link
    link.begin(SOURCE, TARGET)()
    assert link.delivered(SOURCE, TARGET)
    here.region[here.layout.chunk_offsets[1] + TARGET[0] * here.layout.block_stride_bytes] ^= 1
    assert not link.delivered(SOURCE, TARGET)


def test_blocks_of_another_shape_are_refused(peer: Peer) -> None:
    """Two workers with different models, or block sizes, do not exchange blocks."""
    with pytest.raises(TransportFailed, match="differ"):
        Ours("BLHNC").link(peer.handle)


def test_a_killed_peer_breaks_the_link(peer: Peer) -> None:
    """The move goes by tokens, and no later one waits for it; other peers are still read."""
    here, other = Ours(), Peer()
    link = here.link(peer.handle).link
    peer.process.kill()
    peer.process.wait()
    for _ in range(2):
        with pytest.raises(LinkBroken):
            Puller(link).pull(SOURCE, TARGET)
    assert not here.region.any()
    link.close()
    here.link(other.handle).link.begin(SOURCE, TARGET)()
    assert here.region.any()
    other.kill()


def test_a_frozen_peer_s_late_data_reaches_no_block(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks have long been given to others by then.  The buffer that it may write to is not reused."""
    monkeypatch.setattr(nixl, "STUCK_S", 0.5)
    here = Ours()
    link = here.link(peer.handle).link
    peer.freeze()
    with pytest.raises(LinkBroken, match="did not come within"):
        Puller(link).pull(SOURCE, TARGET)
    link.close()
    os.kill(peer.pid, signal.SIGCONT)
    again = here.link(peer.handle).link
    reference = make_cache()
    fill(reference)
    for source in (SOURCE, SOURCE[::-1]):
        again.begin(source, TARGET)()
        assert all(
            torch.equal(mine[TARGET], theirs[source]) for mine, theirs in zip(here.tensors, reference, strict=True)
        )
    here.region.zero_()
    again.begin([1], [1])()
    for mine in here.tensors:
        mine[1] = 0
        assert not mine.any()


def test_after_a_few_hung_reads_there_are_no_more(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a buffer for good: so tokens it is, until the worker restarts."""
    here = Ours()
    link = here.link(peer.handle).link
    peer.freeze()
    monkeypatch.setattr(nixl, "STUCK_S", 0.1)
    for _ in range(nixl.MOST_STUCK):
        with pytest.raises(LinkBroken, match="did not come within"):
            link.begin([1], [1])()
    with pytest.raises(LinkBroken, match="reads from other machines hang"):
        link.begin([1], [1])()


def test_a_missing_interface_is_reported() -> None:
    """In words, and its worker serves on: its requests move by tokens."""
    code = "from tests.migrate.transports.test_nixl import Ours; Ours(interface='none0')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "TransportFailed: nixl: " in done.stderr
