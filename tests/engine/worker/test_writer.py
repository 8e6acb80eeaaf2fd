"""A worker's output, and when it is sure to be received."""

import socket

from melld.engine.wire import messages as wire
from melld.engine.worker.writer import Writer


def test_a_message_is_on_its_way_when_the_call_returns() -> None:
    """A request that kills its worker at once must be on record as present, or it would kill one after another."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = Writer(ours)
        writer.start()
        writer.tell(wire.RequestTaken(request="r", lease=1))
        theirs.setblocking(False)
        assert b"RequestTaken" in theirs.recv(4096)
        writer.finish()
