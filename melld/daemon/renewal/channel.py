"""What the two sides of a renewal have in common: the channel between them, and the work that events lead to.

Owns the messages and their transport: one packet each, which may carry descriptors.
"""

import abc
import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from melld.daemon.renewal.handover import OVER, Command, Event, State, step

log = logging.getLogger("melld.renewal")

VARIABLE = "MELLD_RENEWS"
"""Holds the descriptor of the channel to the daemon being replaced."""
OTHER_VERSION = "the other daemon runs another version of melld: restart instead of renewing"
MAX_MESSAGE_BYTES, MAX_DESCRIPTORS = 1 << 16, 200


class Inherited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Old to new, first: identity and resources.  Carries its lock, its control socket and its API's sockets."""

    pid: int
    address: tuple[str, int]
    """The API's, as it was configured."""
    is_adopted: bool
    """The API's sockets come from the service manager."""
    devices: tuple[str, ...]
    memory_bytes: int = 0
    """How much several models may hold on all CPU devices together; 0: no such limit."""
    has_stand_in: bool
    """A process waits until the last daemon ends."""


class Told(msgspec.Struct, frozen=True, tag=True):
    """An event for the other side.  YOURS carries idle connections, and is sent more than once if they are many."""

    event: Event


class Failed(msgspec.Struct, frozen=True, tag=True):
    """New to old, last: why it failed to start; to either side of itself, that it does not understand the other."""

    reason: str


class Given(msgspec.Struct, frozen=True, tag=True):
    """Old to new: these devices are empty."""

    devices: tuple[str, ...]


class Left(msgspec.Struct, frozen=True, tag=True):
    """Old to new, again and again: what it still has."""

    calls: int = 0
    drained: tuple[tuple[str, str], ...] = ()
    """Devices that an operator wants kept free, each with its model's name, or "" if there is one."""


Message = Inherited | Told | Failed | Given | Left
_DECODER = msgspec.json.Decoder(Message)


def receive(end: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message with its descriptors, `Failed` if it cannot be understood; None at the channel's end.

    Raises:
        BlockingIOError: there is none yet.
    """
    try:
        packet, descriptors, _, _ = socket.recv_fds(end, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    try:
        return (_DECODER.decode(packet), list(descriptors)) if packet else None
    except msgspec.MsgspecError:
        for one in descriptors:
            os.close(one)
        log.error("renewal: %s", OTHER_VERSION)
        return Failed(OTHER_VERSION), []


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


Act = Callable[[], Coroutine[Any, Any, object] | None]
"""What a command has a side do, at once or in a task."""


class Side(abc.ABC):
    """A side of a renewal, on this loop: its state, its end of the channel, and the tasks of its commands."""

    acts: Mapping[Command, Act]

    def __init__(self, end: socket.socket, state: State) -> None:
        self.state = state
        self._end = end
        self._tasks: set[asyncio.Task[object]] = set()

    def listen(self) -> None:
        """Handle the other side's messages from now on."""
        self._end.setblocking(False)
        asyncio.get_running_loop().add_reader(self._end, self._read)

    def happen(self, event: Event) -> None:
        """Handle an event, unless the renewal is over."""
        if self.state in OVER:
            return
        self.state, commands = step(self.state, event)
        for task in self._tasks if self.state in OVER else ():
            task.cancel()
        for command in commands:
            if (work := self.acts[command]()) is not None:
                self._tasks.add(task := asyncio.create_task(work, name=f"renewal: {command}"))
                task.add_done_callback(self._tasks.discard)
        self.changed()

    @abc.abstractmethod
    def changed(self) -> None:
        """Tell people of the new state."""

    @abc.abstractmethod
    def heard(self, message: Message, descriptors: list[int]) -> None:
        """Handle a message of the other side."""

    def say(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, unless the other side is gone."""
        say(self._end, message, descriptors)

    @property
    def is_alone(self) -> bool:
        """Return True once the other side has ended."""
        return self._end.fileno() < 0

    def close(self) -> None:
        """Stop sending and receiving."""
        if not self.is_alone:
            asyncio.get_running_loop().remove_reader(self._end)
            self._end.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if (received := receive(self._end)) is not None:
                self.heard(*received)
            else:
                self.close()
                self.happen(Event.OTHER_ENDED)
