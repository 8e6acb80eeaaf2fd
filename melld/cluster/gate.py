"""The gate at which agents connect: the daemon's TLS listener.

Owns the tokens, each of which opens it once, and what an agent must bring to be let in.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import Any

from melld.cluster.certificate import make_certificate
from melld.cluster.envelopes import Facts, Hello, Leave, ToDaemon
from melld.cluster.facts import why_different
from melld.cluster.link import Link

log = logging.getLogger("melld.cluster")
HELLO_S = 30.0
"""How long a connection may take for TLS, and as long again to say who it is."""


class Gate:
    """The listener.  Calls `entered(hello, link)` for an agent that may join, `refused(machine, reason)` for others."""

    def __init__(
        self,
        ours: Facts,
        silence_s: float,
        entered: Callable[[Hello, Link], None],
        refused: Callable[[str, str], None],
    ) -> None:
        self._ours = ours
        self._silence_s = silence_s
        self._entered = entered
        self._refused = refused
        self._tokens: dict[str, str] = {}
        self._made = make_certificate()
        self._server: asyncio.Server | None = None

    @property
    def certificate(self) -> str:
        """Return the certificate that agents pin, as PEM."""
        return self._made.pem

    @property
    def port(self) -> int:
        """Return the port; 0 before `open`."""
        return int(self._server.sockets[0].getsockname()[1]) if self._server is not None else 0

    async def open(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be used.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._stranger,
            host,
            port,
            ssl=self._made.context,
            ssl_handshake_timeout=HELLO_S,
            ssl_shutdown_timeout=1.0,
        )

    def close(self) -> None:
        """Stop listening and reject pending connections; admitted ones stay open."""
        self._tokens.clear()
        if self._server is not None:
            self._server.close()

    def expect(self, machine: str) -> str:
        """Return a new token for an agent of that machine; its earlier ones become invalid."""
        token = secrets.token_hex(16)
        self._tokens[machine] = token
        return token

    def _stranger(self) -> Link:
        def received(message: Any, _payload: list[bytes]) -> None:
            timer.cancel()
            self._greeted(link, message)

        def lost(_reason: str) -> None:
            timer.cancel()

        link = Link(ToDaemon, self._silence_s, received, lost)
        timer = asyncio.get_running_loop().call_later(HELLO_S, link.end, "it did not identify itself")
        return link

    def _greeted(self, link: Link, message: Any) -> None:
        if not isinstance(message, Hello) or not self._has_token(message):
            log.warning("rejected a connection without a valid token")
            link.end("it has no valid token")
            return
        del self._tokens[message.machine]
        why = why_different(self._ours, message.facts)
        if why is None and not message.devices:
            why = "it has no free device"
        if why is not None:
            link.send(Leave(why))
            link.close()
            self._refused(message.machine, why)
            return
        self._entered(message, link)

    def _has_token(self, hello: Hello) -> bool:
        expected = self._tokens.get(hello.machine)
        return expected is not None and hmac.compare_digest(expected.encode(), hello.token.encode())
