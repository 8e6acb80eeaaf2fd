"""A link's trials: a way that raises or delivers other bytes is not used, and the next one is."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Self

import pytest
import torch

from melld.migrate.transports import choose, cuda_canary, shared_memory
from melld.migrate.transports.layout import KvLayout, layout_of
from melld.migrate.transports.shared_memory import SharedMemoryLink
from melld.migrate.transports.transport import KvHandle, Puller, TransportFailed, Wait
from tests.migrate.transports.sibling import BLOCKS, fill, make_cache


class Oddity(Exception):
    """A foreign exception."""


def regions(fill_source: bool) -> tuple[torch.Tensor, torch.Tensor]:
    source = cuda_canary.pattern(7) if fill_source else torch.zeros(cuda_canary.LAYOUT.region_bytes, dtype=torch.uint8)
    return source, torch.empty_like(source)


def shuffled(link: SharedMemoryLink) -> Callable[[Sequence[int], Sequence[int]], Wait]:
    return lambda source, target: link.begin(source, sorted(target))


@pytest.mark.parametrize(
    ("whole", "garble", "trusted"),
    [(True, lambda link: link.begin, True), (False, lambda link: link.begin, False), (True, shuffled, False)],
    ids=["delivers", "delivers zeros", "delivers to the wrong blocks"],
)
def test_a_way_is_trusted_once_it_has_delivered_the_canary(
    whole: bool, garble: Callable[[SharedMemoryLink], Callable[..., Wait]], trusted: bool
) -> None:
    """A driver that promises peer access and delivers other bytes would silently corrupt answers."""
    source, room = regions(whole)
    link = SharedMemoryLink(source, cuda_canary.LAYOUT, room, cuda_canary.LAYOUT)
    refused = pytest.raises(TransportFailed, match="different bytes from the peer's")
    with contextlib.nullcontext() if trusted else refused:
        cuda_canary.require_delivered("link", garble(link), room, seed=7)


class _Recorder(SharedMemoryLink):
    """A link whose pieces end when they are waited for; reports how many are in flight."""

    flying = most = 0
    fails_at = -1

    def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
        landed = super().begin(source_blocks, destination_blocks)
        self.flying += 1
        self.most = max(self.most, self.flying)

        def land() -> None:
            landed()
            self.flying -= 1
            if source_blocks[0] == self.fails_at:
                raise TransportFailed("recorder", "as asked")

        return land

    @classmethod
    def make(cls) -> Self:
        source, target = make_cache(), make_cache()
        fill(source)
        layout = layout_of(source, BLOCKS)
        memory = [torch.empty(0, dtype=torch.uint8).set_(one[0].untyped_storage()) for one in (source, target)]
        return cls(memory[0], layout, memory[1], layout)


def test_pieces_overlap_and_none_is_left_in_flight() -> None:
    """The device does not idle between two pieces; after a pull, blocks belong only to their owner."""
    link = _Recorder.make()
    Puller(link, piece_bytes=1).pull([0, 1, 2, 3], [4, 5, 6, 7])
    assert (link.most, link.flying) == (2, 0)


def test_no_piece_is_in_flight_after_a_failed_one() -> None:
    """Else a failed move would return blocks that a copy still writes to."""
    link = _Recorder.make()
    link.fails_at = 1
    with pytest.raises(TransportFailed, match="as asked"):
        Puller(link, piece_bytes=1).pull([0, 1, 2, 3], [4, 5, 6, 7])
    assert link.flying == 0


def test_a_link_that_fails_its_trial_is_closed_and_the_next_way_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unusable mapping would hold a dead sibling's memory indefinitely; an operator reads why it is unusable."""
    tensors = make_cache()
    layout = layout_of(tensors, BLOCKS)
    handle = shared_memory.export(tensors, layout)
    region = torch.empty(0, dtype=torch.uint8).set_(make_cache()[0].untyped_storage())
    closed: list[str] = []

    class Broken(SharedMemoryLink):
        def begin(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> Wait:
            raise Oddity("no kernel image is available")

        def close(self) -> None:
            closed.append("broken")

    def open_broken(handle: KvHandle, region: torch.Tensor, layout: KvLayout) -> Broken:
        return Broken(region, layout, region, layout)

    ways = [("broken", open_broken), (shared_memory.NAME, shared_memory.open_link)]
    monkeypatch.setattr(choose, "_ways", lambda *_: ways)
    opened = choose.open_best(handle, region, layout, scratch=[1, 2])
    assert opened.transport == shared_memory.NAME
    assert closed == ["broken"]
    assert "broken: Oddity: no kernel image is available" in caplog.text
