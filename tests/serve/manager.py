"""A service manager's end of the notify socket."""

import contextlib
import select
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.patience import PATIENCE_S


@contextlib.contextmanager
def manager_at(path: Path) -> Iterator[socket.socket]:
    """Return what a service manager listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(PATIENCE_S)
        yield manager


def forget_heard(manager: socket.socket) -> None:
    """Forget what was read: an unread line would leave no room for the next message."""
    while select.select([manager], [], [], 0)[0]:
        manager.recv(4096)


def hear_until(manager: socket.socket, words: str) -> None:
    while words not in manager.recv(4096).decode():
        pass
