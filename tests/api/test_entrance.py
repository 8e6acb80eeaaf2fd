"""Closing, reopening or handing over the entrance is invisible to its clients."""

import asyncio
import socket

from aiohttp import web

from melld.api.connections.connection import ConnectionServer
from melld.api.connections.entrance import Entrance
from melld.config_server import ServerConfig

ASK = b"GET / HTTP/1.1\r\nHost: melld\r\n\r\n"


def served_by(name: str, listener: socket.socket) -> Entrance:
    """Return an entrance whose handler answers with this name."""

    async def handle(_request: web.BaseRequest) -> web.Response:
        return web.Response(text=name)

    return Entrance([listener], ConnectionServer(handle, ServerConfig()))


async def asked(reader: asyncio.StreamReader) -> tuple[str, bool]:
    """Return who answered, and whether the connection will close."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split()[0])
    return (await reader.readexactly(length)).decode(), "connection: close" in head


async def test_a_handed_over_connection_notices_nothing() -> None:
    """Silent, between two requests or in the queue, it moves; one with half a head stays."""
    with socket.create_server(("127.0.0.1", 0)) as listener, listener.dup() as shared:
        address = listener.getsockname()
        old, new = served_by("old", listener), served_by("new", shared)
        old.open()
        blank, idle, half = [await asyncio.open_connection(*address) for _ in range(3)]
        idle[1].write(ASK)
        assert await asked(idle[0]) == ("old", False)
        half[1].write(ASK[:10])
        await asyncio.sleep(0.05)  # until the head's beginning has been read
        old.close()
        queued = await asyncio.open_connection(*address)
        for one in (blank, idle, queued):
            one[1].write(ASK)
        given = old.give_away()
        assert len(given) == 2
        new.open()
        new.join(given)
        assert [await asked(one[0]) for one in (blank, idle, queued)] == [("new", False)] * 3
        half[1].write(ASK[10:])
        assert await asked(half[0]) == ("old", False)
        for one in (blank, idle, half, queued):
            one[1].close()
        new.stop()
        old.stop()


async def test_queued_connections_are_answered_after_reopening() -> None:
    """This is what follows a failed renewal."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        entrance = served_by("old", listener)
        entrance.open()
        blank, idle = [await asyncio.open_connection(*listener.getsockname()) for _ in range(2)]
        idle[1].write(ASK)
        assert await asked(idle[0]) == ("old", False)
        entrance.close()
        for one in (blank, idle):
            one[1].write(ASK)
        await asyncio.sleep(0.05)
        entrance.open()
        assert [await asked(one[0]) for one in (blank, idle)] == [("old", False)] * 2
        for one in (blank, idle):
            one[1].close()
        entrance.stop()
