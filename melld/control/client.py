"""Synchronous client of the control socket for the command line, using only the standard library.

Owns finding the socket and telling "no daemon" from "refused".  What it returns is safe to print, as another program
may own the socket.  Never imports aiohttp, rich or the daemon: `melld status` must answer at once.
"""

import http.client
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from melld.control.messages import CONTROL_SOCKET, ControlErrorBody
from melld.errors import MelldError
from melld.printable import printable, printable_all

LONGEST_LINE_BYTES = 1 << 20
ANSWER_S = 10.0
"""Time that the daemon has to answer a request for its status."""


class NoDaemon(MelldError):
    """No daemon answered at any of the sockets tried."""

    def __init__(self, tried: Sequence[tuple[Path, str]]) -> None:
        where = "; ".join(f"{path}: {why}" for path, why in tried)
        super().__init__(f"no daemon running ({where}): start one with `melld serve`, or set --runtime-directory")
        self.tried = tuple(tried)


class ControlRefused(MelldError):
    """The daemon answered, but did not carry out the operation."""

    def __init__(self, http_status: int, reason: ControlErrorBody) -> None:
        super().__init__(reason.message)
        self.http_status = http_status
        self.reason = reason


class ControlClient:
    """A client of the first of `directories` in which a daemon listens, with one connection per request."""

    def __init__(self, directories: Sequence[Path], answer_s: float = ANSWER_S) -> None:
        self._directories = tuple(directories)
        self._answer_s = answer_s

    def status(self) -> bytes:
        """Return the daemon's `DaemonStatus` as the JSON that it sent, which may have fields unknown to this program.

        Raises:
            NoDaemon: no daemon listens.
            ControlRefused: the daemon returned no status.
            msgspec.MsgspecError: the answer is not JSON.
        """
        return self._ask("GET", "status", b"", self._answer_s)

    def operate(self, operation: str, message: msgspec.Struct, deadline_s: float | None = None) -> bytes:
        """Return the daemon's answer to `POST /<operation>` as JSON; the operation may take `deadline_s`.

        Raises:
            NoDaemon: no daemon listens.
            ControlRefused: the daemon could not do it, or did not answer in time; the reason says which.
        """
        return self._ask("POST", operation, msgspec.json.encode(message), deadline_s or self._answer_s)

    def _ask(self, method: str, name: str, body: bytes, deadline_s: float) -> bytes:
        connection = self._connect(deadline_s)
        try:
            connection.request(method, f"/{name}", body or None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        except TimeoutError:
            why = f"the daemon accepted the connection, but did not answer within {deadline_s:g} s"
            raise ControlRefused(504, ControlErrorBody(code="no_answer", message=why)) from None
        except (OSError, http.client.HTTPException) as error:
            why = f"it closed the connection without responding ({printable(str(error))})"
            raise NoDaemon([(connection.path, why)]) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise ControlRefused(answer.status, _reason(answer.status, text))
        return msgspec.json.encode(printable_all(msgspec.json.decode(text)))

    def begin(self, operation: str, message: msgspec.Struct) -> "OpenAnswer":
        """Begin an operation that lasts as long as its connection.

        Raises:
            NoDaemon, ControlRefused: see `operate`.
        """
        connection = self._connect(self._answer_s)
        line = msgspec.json.encode(message) + b"\n"
        try:
            connection.putrequest("POST", f"/{operation}")
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            connection.send(b"%x\r\n%b\r\n" % (len(line), line))  # the chunk that would end the body never comes
            channel = connection.sock
            answer = connection.getresponse()
            text = answer.read() if answer.status >= 400 else b""
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoDaemon([(connection.path, f"no answer ({printable(str(error))})")]) from error
        if answer.status >= 400:
            connection.close()
            raise ControlRefused(answer.status, _reason(answer.status, text))
        channel.settimeout(None)
        return OpenAnswer(channel, answer)

    def _connect(self, deadline_s: float) -> "_UnixConnection":
        tried = []
        for directory in self._directories:
            connection = _UnixConnection(directory / CONTROL_SOCKET, deadline_s)
            try:
                _check_owner(directory)
                connection.connect()
                return connection
            except OSError as error:
                connection.close()
                tried.append((connection.path, _why(error)))
        raise NoDaemon(tried)


class OpenAnswer:
    """An operation that lasts until `close`, or until this process or the daemon ends."""

    def __init__(self, channel: socket.socket, answer: http.client.HTTPResponse) -> None:
        self._channel = channel
        self._answer = answer

    def lines(self) -> Iterator[bytes]:
        """Yield the daemon's messages as JSON until it stops sending.

        Raises:
            msgspec.MsgspecError: a line is not JSON.
        """
        while line := self._read_line():
            yield msgspec.json.encode(printable_all(msgspec.json.decode(line)))

    def close(self) -> None:
        """Close the connection; the remaining lines are not needed."""
        self._answer.close()
        self._channel.close()

    def _read_line(self) -> bytes:
        try:
            return self._answer.readline(LONGEST_LINE_BYTES)
        except (OSError, http.client.HTTPException):  # the daemon has gone
            return b""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("melld", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def _check_owner(directory: Path) -> None:
    """Raise `PermissionError` if neither we nor root own the directory: /tmp is open to all.  Root may ask anybody."""
    owner = directory.stat().st_uid
    if os.getuid() not in (0, owner) and owner != 0:
        raise PermissionError(None, f"the directory belongs to user {owner}")


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such socket"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens"
    return str(error.strerror or error).lower()


def _reason(status: int, text: bytes) -> ControlErrorBody:
    try:
        body = msgspec.json.decode(text, type=ControlErrorBody)
        return ControlErrorBody(code=printable(body.code), message=printable(body.message))
    except msgspec.MsgspecError:  # an error outside our handlers: aiohttp answers in plain text
        return ControlErrorBody(code="internal_error", message=f"the daemon returned {status}: see its log")
