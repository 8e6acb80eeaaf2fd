"""The watch over a client that does not read its answer."""

import asyncio
import fcntl
import struct
import termios

from aiohttp import web


class ReaderWatch:
    """Aborts a connection whose client has read nothing for `slow_reader_s` while data was waiting.

    A context manager around the writing of one stream; `ended` says whether it has aborted it.
    """

    def __init__(self, request: web.BaseRequest, slow_reader_s: float) -> None:
        self._writer = request.writer
        self._transport = request.transport
        self._slow_reader_s = slow_reader_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._taken_bytes = -1
        self.ended = False

    def __enter__(self) -> "ReaderWatch":
        self._timer = self._loop.call_later(self._slow_reader_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        waiting_bytes = self._transport.get_write_buffer_size()
        offered_bytes = kernel_bytes(self._transport)  # none, if this loop was held up: the client has taken all of it
        taken_bytes = self._writer.output_size - waiting_bytes - offered_bytes
        if waiting_bytes and offered_bytes and taken_bytes == self._taken_bytes:
            self.ended = True
            self._transport.abort()
            return
        self._taken_bytes = taken_bytes
        self._timer = self._loop.call_later(self._slow_reader_s, self._look)


def kernel_bytes(transport: asyncio.Transport) -> int:
    """Return how many bytes the kernel holds for the peer, which has not acknowledged them (tcp(7), SIOCOUTQ).

    The kernel takes more only when half of UNSENT_BYTES has gone: by what it takes alone, whoever reads that half
    slowly would read nothing.
    """
    descriptor = transport.get_extra_info("socket").fileno()
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0])
