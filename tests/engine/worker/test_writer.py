"""What a worker says, and when it is sure to be heard."""

import socket

from melld.engine.wire import messages as wire
from melld.engine.worker.writer import Writer


def test_what_is_told_is_on_its_way_when_the_call_returns() -> None:
    """A request that ends its worker at once was there, and bears that death: else it would end one after another."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = Writer(ours)
        writer.start()
        writer.tell(wire.RequestTaken(request="r", lease=1))
        theirs.setblocking(False)
        assert b"RequestTaken" in theirs.recv(4096)
        writer.finish()
