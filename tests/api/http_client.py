"""An HTTP client that hides nothing: one request per connection, or raw bytes on a socket."""

import contextlib
import http.client
import json
import socket
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S

MODEL = "demo"
API_KEY = "a-key-for-tests"
PAGE_ORIGIN = "http://chat.example"
"""The one origin whose pages may call the daemon with a key."""
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Answered(NamedTuple):
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the parsed JSON body."""
        return json.loads(self.body)


def request(url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answered:
    """Send one request with the key; `body` is bytes, or an object to encode as JSON."""
    payload = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    head = {"Authorization": f"Bearer {API_KEY}"} | ({"Content-Type": "application/json"} if payload else {})
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, payload, head | (headers or {}))
        response = connection.getresponse()
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Answered(response.status, fields, response.read())


def connect(url: str, receive_bytes: int | None = None) -> socket.socket:
    """Open a connection; with `receive_bytes` the kernel buffers little and segments are network-sized.

    A sender sees what its reader takes in steps of the receive buffer, or of a segment: 64 KiB on loopback.
    """
    parts = urlsplit(url)
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.settimeout(PATIENCE_S)
    connection.connect((parts.hostname, parts.port))
    return connection


def talk(url: str, *pieces: bytes) -> bytes:
    """Send these bytes and read until the other side closes."""
    with connect(url) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                connection.sendall(piece)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def head(*lines: str, method: str = "POST", path: str = CHAT, key: str = API_KEY) -> bytes:
    """Return the head of a request that asks to close the connection."""
    fixed = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
    return "\r\n".join([*fixed, "Content-Type: application/json", "Connection: close", *lines, "", ""]).encode()


def post(body: Any, path: str = CHAT) -> bytes:
    """Return a complete request."""
    payload = json.dumps(body).encode()
    return head(f"Content-Length: {len(payload)}", path=path) + payload


def chat(**fields: Any) -> dict[str, Any]:
    """Return a chat of one short message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4} | fields


def completion(**fields: Any) -> dict[str, Any]:
    """Return a completion of one word."""
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 4} | fields
