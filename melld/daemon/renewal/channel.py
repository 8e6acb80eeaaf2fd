"""The messages between two daemons while one takes over from the other.

Owns the messages and their transport: one packet each, which may carry descriptors.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec

VARIABLE = "MELLD_RENEWS"
"""Holds the descriptor of the channel to the daemon being replaced."""
MAX_MESSAGE_BYTES, MAX_DESCRIPTORS = 1 << 16, 200


class Inherited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Old to new, first: identity and resources.  Carries its lock, its control socket and its API's sockets."""

    pid: int
    directory: str
    """Its runtime directory."""
    host: str
    port: int
    is_adopted: bool
    """The API's sockets come from the service manager."""
    devices: tuple[str, ...]
    memory_bytes: int = 0
    """How much several models may hold on all CPU devices together; 0: no such limit."""
    has_stand_in: bool
    """A process waits until the last daemon ends."""


class Wants(msgspec.Struct, frozen=True, tag=True):
    """New to old: asks for the devices of another worker."""


class Serves(msgspec.Struct, frozen=True, tag=True):
    """New to old: a worker is ready."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """New to old, last: why it failed to start."""

    reason: str


class Stops(msgspec.Struct, frozen=True, tag=True):
    """New to old: it was told to stop, which ends both daemons."""


class Given(msgspec.Struct, frozen=True, tag=True):
    """Old to new: these devices are empty."""

    devices: tuple[str, ...]


class Yours(msgspec.Struct, frozen=True, tag=True):
    """Old to new: it accepts no more requests.  Carries idle connections; sent more than once if they are many."""


class CalledOff(msgspec.Struct, frozen=True, tag=True):
    """Old to new: the renewal is cancelled."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """Old to new: number of calls still running there."""

    calls: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Old to new, last: devices that an operator wants kept free, each with its model's name, or "" if there is one."""

    drained: tuple[tuple[str, str], ...]


Message = Inherited | Wants | Serves | Failed | Stops | Given | Yours | CalledOff | Left | Gone
_DECODER = msgspec.json.Decoder(Message)


def receive(end: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message with its descriptors; None at the end of the channel.

    Raises:
        BlockingIOError: there is none yet.
    """
    try:
        packet, descriptors, _, _ = socket.recv_fds(end, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        packet, descriptors = b"", []
    return (_DECODER.decode(packet), list(descriptors)) if packet else None


def say(end: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message, unless the other side is gone."""
    with contextlib.suppress(OSError):  # the end is noticed when reading
        socket.send_fds(end, [msgspec.json.encode(message)], descriptors)


def failure_teller(environment: Mapping[str, str]) -> Callable[[str], None]:
    """Return a function that tells the daemon to be replaced why that failed; it does nothing if there is none."""
    if (descriptor := environment.get(VARIABLE)) is None:
        return lambda _: None
    end = socket.socket(fileno=os.dup(int(descriptor)))
    return lambda reason: say(end, Failed(reason))


class Channel:
    """One end of a channel, on this loop: `heard` gets each message; `ended` is called once the other is gone."""

    def __init__(
        self,
        end: socket.socket,
        heard: Callable[[Message, list[int]], None],
        ended: Callable[[], None],
    ) -> None:
        self._end = end
        self._heard = heard
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    def say(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, unless the other side is gone."""
        say(self._end, message, descriptors)

    def close(self) -> None:
        """Stop sending and receiving."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._end.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if (received := receive(self._end)) is not None:
                self._heard(*received)
            else:
                self.close()
                self._ended()
