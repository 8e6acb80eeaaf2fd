"""One end of a connection that carries envelopes: framing, beats, and the end of it.

Owns the transport.  Time is counted in ticks of this end's loop, so one that was itself held up blames nobody.

The daemon decides who is lost, after `silence_s`.  An agent, which cannot know whether its daemon is gone or held up,
waits `AGENT_PATIENCE` times as long: a daemon that has given it up meanwhile has closed the connection, so nothing that
its workers still say is heard.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from melld.cluster.envelopes import MAX_ENVELOPE_BYTES, Beat
from melld.engine.wire.frames import Buffer, FrameDecoder, encode_frame

TICKS = 4
"""Ticks, and beats, in `silence_s`."""
AGENT_PATIENCE = 6
QUIET_S = 3.0
"""More than passes between two readings of an agent."""


class Link(asyncio.Protocol):
    """An end.  Calls `received(message, payload)`, and `lost(reason)` once, after which nothing more is received.

    `silence_s`: after `patience` times so long without a byte it is lost; None: only when the other end closes it.
    """

    def __init__(
        self,
        messages: Any,
        silence_s: float | None,
        received: Callable[[Any, list[bytes]], None],
        lost: Callable[[str], None],
        patience: int = 1,
    ) -> None:
        self._decoder = FrameDecoder(messages, MAX_ENVELOPE_BYTES)
        self._silence_s = silence_s
        self._patience = patience
        self.received = received
        self.lost = lost
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silent_ticks = 0
        self._heard_s = 0.0
        self.is_open = False

    @property
    def is_silent(self) -> bool:
        """Return True if nothing was received recently; that alone is not a loss."""
        return asyncio.get_running_loop().time() - self._heard_s > QUIET_S

    def send(self, message: msgspec.Struct, payload: Sequence[Buffer] = ()) -> None:
        """Write an envelope; drop it when the connection is over."""
        if self.is_open and self._transport is not None:
            self._transport.writelines(encode_frame(message, payload))

    def close(self) -> None:
        """Write pending data and close, without calling `lost`."""
        if self._finish() and self._transport is not None:
            self._transport.close()

    def end(self, reason: str) -> None:
        """Drop the connection immediately, discarding pending data, and call `lost`."""
        if self._finish():
            if self._transport is not None:
                self._transport.abort()
            self.lost(reason)

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        self.is_open = True
        if self._silence_s is not None:
            self._wait()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._silent_ticks = 0
        self._heard_s = asyncio.get_running_loop().time()
        frames = self._decoder.feed(data)
        while self.is_open:
            try:
                frame = next(frames, None)
            except (ValueError, msgspec.MsgspecError) as error:
                self.end(f"it sent an invalid envelope: {error}")
                return
            if frame is None:
                return
            if not isinstance(frame[0], Beat):
                self.received(*frame)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.end("the connection was closed" if error is None else f"the connection broke: {error}")

    def _finish(self) -> bool:
        """Return True the first time."""
        was_open, self.is_open = self.is_open, False
        if self._timer is not None:
            self._timer.cancel()
        return was_open

    def _wait(self) -> None:
        assert self._silence_s is not None
        self._timer = asyncio.get_running_loop().call_later(self._silence_s / TICKS, self._tick)

    def _tick(self) -> None:
        assert self._silence_s is not None
        if self._silent_ticks >= TICKS * self._patience:
            self.end(f"no message received for {self._silence_s * self._patience:g} s")
            return
        self._silent_ticks += 1
        self.send(Beat())
        self._wait()
