"""A worker's links, over links that behave as a test needs."""

import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from melld.engine.wire import messages as wire
from melld.engine.wire.spec import CopyRules
from melld.engine.worker.links import Links, LinkTried, Shared
from melld.migrate.transports.choose import OpenedLink
from melld.migrate.transports.layout import KvLayout
from melld.migrate.transports.transport import Link, TransportFailed
from tests.patience import PATIENCE_S


class StuckLink(Link):
    """A link whose memory the driver does not unmap."""

    def __init__(self) -> None:
        layout = KvLayout(4, 8, 8, (0,), 32)
        super().__init__(layout, torch.empty(0), layout)

    def close(self) -> None:
        raise TransportFailed("cuda", "cudaIpcCloseMemHandle: invalid argument (1)")


def test_a_link_that_fails_to_close_still_counts_as_closed(caplog: pytest.LogCaptureFixture) -> None:
    """No copy reads the dead sibling's memory any longer: whoever waits to lend it on must hear so."""
    tried: queue.SimpleQueue[LinkTried] = queue.SimpleQueue()
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    residency: Any = SimpleNamespace(borrow_scratch=lambda _: [], return_scratch=lambda _: None)
    links = Links(Shared(), CopyRules(), residency, tried.put, said.put)
    links.open("w1", b"")
    number = tried.get(timeout=PATIENCE_S).number
    links.tried(LinkTried("w1", number, [], OpenedLink("cuda_peer", StuckLink(), 1.0), ""))
    assert said.get(timeout=PATIENCE_S) == wire.LinkOpened(peer="w1", transport="cuda_peer", bytes_per_s=1.0)
    links.close("w1")
    assert said.get(timeout=PATIENCE_S) == wire.LinkClosed("w1")
    assert "memory of w1 was not unmapped: cuda: cudaIpcCloseMemHandle" in caplog.text
