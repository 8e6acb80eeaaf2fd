"""Framing of messages on the socket between the daemon and a worker.

Owns the framing, without I/O and without the messages (`wire`).  A frame is a head (a message, as MessagePack) and any
number of payload buffers.

    uint32 n | n times uint32 length | head | n-1 buffers          little-endian
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

Buffer = bytes | bytearray | memoryview
_COUNT = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 1 << 18
"""As much is read from a wire at once."""

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the buffers to write, in order, for `message` and its payload."""
    head = _encoder.encode(message)
    lengths = [len(head), *(memoryview(buffer).nbytes for buffer in payload)]
    return [struct.pack(f"<I{len(lengths)}I", len(lengths), *lengths), head, *payload]


class FrameDecoder:
    """A decoder from bytes to frames (head, payload buffers), without sockets.

    Raises:
        msgspec.ValidationError: a head is none of the expected messages.
        ValueError: a frame larger than any that is ever sent: the stream is out of step.
    """

    def __init__(self, messages: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self.rest_bytes = 0
        """How many bytes have come behind the latest frame."""

    def feed(self, data: Buffer) -> Iterator[tuple[Any, list[bytes]]]:
        """Yield every frame that `data` completes."""
        buffer = self._buffer
        buffer += data
        position = 0
        while (parts := _part_lengths(buffer, position, self._max_frame_bytes)) is not None:
            start = position + 4 * (1 + len(parts))
            end = start + sum(parts)
            if len(buffer) < end:
                break
            payload = []
            for length in parts:
                payload.append(bytes(memoryview(buffer)[start : start + length]))
                start += length
            position = end
            self.rest_bytes = len(buffer) - position
            yield self._decoder.decode(payload[0]), payload[1:]
        if position:
            del buffer[:position]


def _part_lengths(buffer: bytearray, position: int, max_frame_bytes: int) -> tuple[int, ...] | None:
    """Return the lengths of the parts of the frame at `position`, or None while they are incomplete."""
    if len(buffer) - position < 4:
        return None
    (count,) = _COUNT.unpack_from(buffer, position)
    if not 1 <= count <= 4096:
        raise ValueError(f"a frame of {count} parts: the stream is out of step")
    if len(buffer) - position < 4 * (1 + count):
        return None
    lengths = struct.unpack_from(f"<{count}I", buffer, position + 4)
    if sum(lengths) > max_frame_bytes:
        raise ValueError(f"a frame of {sum(lengths)} bytes: the stream is out of step")
    return lengths
