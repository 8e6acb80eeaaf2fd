"""Copies through host memory: what is still under way when a piece fails.  Streams and copies are stand-ins."""

import contextlib
from typing import Any

import pytest
import torch

from melld.migrate.transports import cuda_staged
from melld.migrate.transports.layout import layout_of
from melld.migrate.transports.transport import TransportFailed
from tests.migrate.transports.sibling import BLOCKS, make_cache


class Stream:
    """A stream whose work is done only when it is waited for."""

    def __init__(self, **_: Any) -> None:
        self.queued = 0

    def synchronize(self) -> None:
        self.queued = 0

    def wait_event(self, _event: Any) -> None:
        """Order work, of which there is none here."""


class Event:
    """An event that nobody waits for."""

    def record(self, _stream: Stream) -> None:
        """Mark the present end of the stream."""


class Buffer:
    """A buffer that is not pinned."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.filled, self.emptied = Event(), None


def test_a_piece_that_fails_leaves_none_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever called gives the buffers and the blocks to others as soon as it hears of the failure."""
    queued = []

    def copy(_destinations: Any, _sources: Any, _nbytes: int, stream: Stream) -> None:
        if len(queued) == 3:
            raise TransportFailed("cuda", "the driver refused")
        queued.append(stream)
        stream.queued += 1

    for name, stand_in in (("Stream", Stream), ("Event", Event), ("device", lambda _: contextlib.nullcontext())):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_staged, "_Buffer", Buffer)
    monkeypatch.setattr(cuda_staged, "BUFFER_BYTES", 1)
    monkeypatch.setattr(cuda_staged.cuda_runtime, "copy_batch", copy)
    cache = make_cache()
    region = torch.empty(0, dtype=torch.uint8).set_(cache[0].untyped_storage())
    layout = layout_of(cache, BLOCKS)
    link = cuda_staged.CudaStagedLink(region.data_ptr(), 0, layout, region, layout)
    with pytest.raises(TransportFailed, match="the driver refused"):
        link.begin([0, 1], [2, 3])
    assert [stream.queued for stream in queued] == [0, 0, 0]
