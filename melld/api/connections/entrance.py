"""Where requests come in: the listening sockets, and the idle connections.

Owns that no client notices when it is closed, or handed to another process: what has not begun waits in the kernel.
"""

import socket
from collections.abc import Iterable, Sequence

from melld.api.connections.acceptor import Acceptor
from melld.api.connections.connection import Connection, ConnectionServer


class Entrance:
    """The entrance of one daemon.  Closed until `open`."""

    def __init__(self, listeners: Iterable[socket.socket], server: ConnectionServer) -> None:
        self._acceptors = [Acceptor(listener, server) for listener in listeners]
        self._server = server

    def open(self) -> None:
        """Accept connections, and read from those that were held."""
        for acceptor in self._acceptors:
            acceptor.start()
        for connection in self._connections():
            connection.read_on()

    def close(self) -> None:
        """Stop accepting and reading: requests that have begun are answered, the others wait."""
        for acceptor in self._acceptors:
            acceptor.rest()
        for connection in self._connections():
            connection.hold()

    def give_away(self) -> list[socket.socket]:
        """Return the connections that are held, and forget them."""
        return [given for one in self._connections() if (given := one.give_away()) is not None]

    def join(self, connections: Sequence[socket.socket]) -> None:
        """Serve connections that another process has given away."""
        for connection in connections:
            self._acceptors[0].join(connection)

    def stop(self) -> None:
        """Close the listening sockets."""
        for acceptor in self._acceptors:
            acceptor.stop()

    def _connections(self) -> list[Connection]:
        return [one for one in self._server.connections if isinstance(one, Connection)]
