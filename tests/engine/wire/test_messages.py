"""The frames between daemon and workers."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from melld.engine.wire import messages as wire
from melld.engine.wire.frames import FrameDecoder, encode_frame

PAYLOADS = st.lists(st.binary(max_size=200), max_size=4)
MESSAGES = st.one_of(
    st.builds(wire.AddRequest, request=st.text(max_size=20), lease=st.integers(0, 2**31)),
    st.builds(wire.AbortRequests, requests=st.lists(st.text(max_size=5), max_size=3)),
    st.just(wire.Ping(1.5)),
)


@given(frames=st.lists(st.tuples(MESSAGES, PAYLOADS), max_size=6), data=st.data())
def test_frames_survive_any_split_by_the_socket(
    frames: list[tuple[wire.Message, list[bytes]]], data: st.DataObject
) -> None:
    """A stream socket keeps order, not boundaries: a request must not depend on where a read happens to end."""
    stream = b"".join(bytes(part) for message, payload in frames for part in encode_frame(message, payload))
    decoder = FrameDecoder(wire.ToWorker)
    seen = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        seen += list(decoder.feed(stream[:cut]))
        stream = stream[cut:]
    assert frames == seen


def test_a_stream_that_is_out_of_step_is_refused() -> None:
    """Garbage is an error at once, never gigabytes of waiting."""
    with pytest.raises(ValueError, match="out of step"):
        list(FrameDecoder(wire.ToWorker).feed(struct.pack("<I", 0)))
    with pytest.raises(ValueError, match="out of step"):
        list(FrameDecoder(wire.ToWorker).feed(struct.pack("<II", 1, 2**31)))


def test_a_message_of_the_other_direction_is_refused() -> None:
    """A worker accepts no answers as commands."""
    frame = b"".join(bytes(part) for part in encode_frame(wire.Pong(busy_s=0.0)))
    with pytest.raises(msgspec.ValidationError):
        list(FrameDecoder(wire.ToWorker).feed(frame))
