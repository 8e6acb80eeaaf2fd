"""Asking the daemon over its control socket, from the command line: synchronous, the standard library alone.

Owns finding the socket and telling "nobody is there" from "it said no".  What it returns can be printed as it is: who
has made the socket may be no daemon.  Never imports aiohttp, rich or the daemon: `melld status` must answer at once.
"""

import http.client
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from melld.control.messages import CONTROL_SOCKET, ControlErrorBody
from melld.errors import MelldError
from melld.printable import printable, printable_all

ANSWER_S = 10.0
"""How long the daemon may take to answer a question about its state."""


class NoDaemon(MelldError):
    """No daemon answers at any of the sockets tried."""

    status = 503
    code = "no_daemon"

    def __init__(self, tried: Sequence[tuple[Path, str]]) -> None:
        where = "; ".join(f"{path}: {why}" for path, why in tried)
        super().__init__(f"no daemon to talk to ({where}): start one with `melld serve`, or name --runtime-directory")
        self.tried = tuple(tried)


class ControlRefused(MelldError):
    """The daemon is there, and did not do it."""

    code = "control_refused"

    def __init__(self, http_status: int, reason: ControlErrorBody) -> None:
        super().__init__(reason.message)
        self.http_status = http_status
        self.reason = reason


class ControlClient:
    """Talks to the first of `directories` in which a daemon listens.  One connection per question."""

    def __init__(self, directories: Sequence[Path], answer_s: float = ANSWER_S) -> None:
        self._directories = tuple(directories)
        self._answer_s = answer_s

    def status(self) -> bytes:
        """The daemon's `DaemonStatus`, as the JSON that it sent (which may know more fields than this program).

        Raises:
            NoDaemon: nobody is there.
            ControlRefused: it is there, and gave no status.
            msgspec.MsgspecError: what it sent is not JSON.
        """
        return self._ask("GET", "status", b"", self._answer_s)

    def operate(self, operation: str, message: msgspec.Struct, deadline_s: float | None = None) -> bytes:
        """What the daemon answers to `POST /<operation>`, as JSON; `deadline_s` is how long it may take to do it.

        Raises:
            NoDaemon: nobody is there.
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
            why = f"the daemon is there, but did not answer within {deadline_s:g} s"
            raise ControlRefused(504, ControlErrorBody(code="no_answer", message=why)) from None
        except (OSError, http.client.HTTPException) as error:
            why = f"it went away while it was asked ({printable(str(error))})"
            raise NoDaemon([(connection.path, why)]) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise ControlRefused(answer.status, _reason(answer.status, text))
        return msgspec.json.encode(printable_all(msgspec.json.decode(text)))

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
    """Root may ask anybody; everybody else asks only what is their own, or root's: /tmp is open to all."""
    owner = directory.stat().st_uid
    if os.getuid() not in (0, owner) and owner != 0:
        raise PermissionError(None, f"the directory belongs to user {owner}")


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens"
    return str(error.strerror or error).lower()


def _reason(status: int, text: bytes) -> ControlErrorBody:
    try:
        body = msgspec.json.decode(text, type=ControlErrorBody)
        return ControlErrorBody(code=printable(body.code), message=printable(body.message))
    except msgspec.MsgspecError:  # an error outside our handlers: aiohttp's plain text
        return ControlErrorBody(code="internal_error", message=f"the daemon answered {status}: its log says why")
