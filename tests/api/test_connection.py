"""Connections without an engine: present clients are answered, departed ones noticed, framing is bounded."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop
from aiohttp import web

from melld.api.answers import Refusal
from melld.api.connections import connection
from melld.api.connections.acceptor import SPARE_DESCRIPTORS, Acceptor
from melld.api.connections.connection import ConnectionServer
from melld.api.connections.reader_watch import ReaderWatch
from melld.api.guards.body import read_body
from melld.config_server import ServerConfig
from tests.patience import PATIENCE_S

LOOPS = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
POST = "POST / HTTP/1.1\r\nHost: melld\r\nConnection: close\r\n"


LIMIT_S = 0.3
LARGE_BYTES = 30_000_000
"""More than the kernel takes for a client that does not read."""


class Watched(ConnectionServer):
    """Records when a connection is made and lost."""

    def __init__(self, service: "Service") -> None:
        super().__init__(service.handle, service.limits)
        self._made, self._gone = service.made, service.gone

    def connection_made(self, *made: Any) -> None:
        super().connection_made(*made)
        self._made.set()

    def connection_lost(self, *lost: Any) -> None:
        super().connection_lost(*lost)
        self._gone.set()


class Service:
    """Answers each body with its size when released; /stream writes forever, and /ended writes one line."""

    def __init__(self, limits: ServerConfig) -> None:
        self.limits = limits
        self.made = asyncio.Event()
        self.asked = asyncio.Event()
        self.begun = asyncio.Event()
        self.let = asyncio.Event()
        self.left = asyncio.Event()
        self.gone = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.set()
        try:
            body = await read_body(request, self.limits, request.content_type)
        except Refusal as error:
            return web.Response(status=error.answer.status)
        self.begun.set()
        try:
            if request.path == "/ended":
                ended = web.StreamResponse()
                await ended.prepare(request)
                await ended.write(b"token\n")
                return ended
            if request.path == "/stream":
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(b"token\n")
                    await asyncio.sleep(0.01)
            await self.let.wait()
        except BaseException:
            self.left.set()
            raise
        return web.Response(body=bytes(LARGE_BYTES)) if request.path == "/large" else web.Response(text=str(len(body)))


@contextlib.asynccontextmanager
async def serving(
    family: int = socket.AF_INET, **limits: float
) -> AsyncIterator[tuple[Service, Callable[..., socket.socket]]]:
    """The service, and a connector to it."""
    service = Service(ServerConfig(**limits))  # type: ignore[arg-type]
    runner = web.ServerRunner(Watched(service), shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.socket(family)
    listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else "")  # "": the kernel finds an abstract name
    acceptor = Acceptor(listener, runner.server)  # type: ignore[arg-type]
    address = listener.getsockname()

    def connect(receive_bytes: int | None = None) -> socket.socket:
        client = socket.socket(family)
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(PATIENCE_S)
        client.connect(address)
        return client

    acceptor.start()
    try:
        yield service, connect
    finally:
        acceptor.stop()
        await runner.cleanup()


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PATIENCE_S)


def answer_to(client: socket.socket) -> bytes:
    """Return the whole answer, skipping interim responses as every HTTP/1.1 client does."""
    whole = b"".join(iter(lambda: client.recv(65536), b""))
    while whole.startswith(b"HTTP/1.1 100 "):
        whole = whole.partition(b"\r\n\r\n")[2]
    return whole


def answer_to_the_end(client: socket.socket) -> bytes:
    """Return all that arrived, even if the connection was aborted."""
    came = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 20):
            came += piece
    return bytes(came)


@LOOPS
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX], ids=["tcp", "unix"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(
    "head", ["POST / HTTP/{}\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", "GET /stream HTTP/{}\r\nHost: a\r\n\r\n"]
)
def test_a_client_that_disconnects_frees_its_place(
    make_loop: Callable[[], asyncio.AbstractEventLoop], family: int, version: str, head: str
) -> None:
    """Nothing is computed for a closed connection, before its answer has begun or after."""

    async def check() -> None:
        async with serving(family) as (service, connect):
            with connect() as client:
                client.sendall(head.format(version).encode())
                await soon(service.begun)
            await soon(service.left)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(check())


@LOOPS
@pytest.mark.parametrize("kept", ["", "Connection: keep-alive\r\n"], ids=["plain", "kept"])
def test_a_body_without_a_length_closes_its_connection(
    make_loop: Callable[[], asyncio.AbstractEventLoop], kept: str
) -> None:
    """An HTTP/1.0 client has no other sign that a stream ended; with a known length the connection is kept."""

    async def check() -> None:
        async with serving() as (service, connect):
            service.let.set()
            with connect() as client:
                if kept:
                    client.sendall(f"POST / HTTP/1.0\r\n{kept}Content-Length: 3\r\n\r\nabc".encode())
                    assert (await asyncio.to_thread(client.recv, 65536)).endswith(b"3")
                client.sendall(f"GET /ended HTTP/1.0\r\n{kept}\r\n".encode())
                assert (await asyncio.to_thread(answer_to, client)).endswith(b"\r\n\r\ntoken\n")

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(check())


@LOOPS
@pytest.mark.parametrize("sent", [b"", b"POST / HT", f"{POST}Content-Length: 10\r\n\r\nabc".encode()])
def test_a_truncated_request_is_not_waited_for(make_loop: Callable[[], asyncio.AbstractEventLoop], sent: bytes) -> None:
    """Whoever sends half a request and closes gets no answer."""

    async def check() -> None:
        async with serving() as (_service, connect):
            with connect() as client:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                assert await asyncio.to_thread(answer_to, client) == b""

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(check())


@pytest.mark.parametrize(
    ("version", "coding", "status"),
    [
        ("1.1", "chunked", 200),
        ("1.1", "Chunked", 200),
        ("1.1", "gzip, chunked", 501),
        ("1.1", "identity, chunked", 501),
        ("1.1", "chunked, gzip", 400),
        ("1.1", "chunked, chunked", 400),
        ("1.1", "gzip", 400),
        ("1.0", "chunked", 400),
    ],
)
async def test_chunked_is_the_only_transfer_coding(version: str, coding: str, status: int) -> None:
    """What a proxy and the daemon could frame differently is refused, and the connection with it (RFC 9112, 6.1)."""
    kept = "close" if status == 200 else "keep-alive"
    sent = f"POST / HTTP/{version}\r\nHost: melld\r\nTransfer-Encoding: {coding}\r\nConnection: {kept}\r\n\r\n"
    async with serving() as (service, connect):
        service.let.set()
        with connect() as client:
            client.sendall(sent.encode() + b"3\r\nabc\r\n0\r\n\r\n")
            answer = await asyncio.to_thread(answer_to, client)
        assert answer.split()[1] == str(status).encode(), answer


def talk(client: socket.socket, sent: bytes) -> bytes:
    with contextlib.suppress(ConnectionError):
        client.sendall(sent)
    return answer_to(client)


def chunked(*chunks: bytes) -> bytes:
    return f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode() + b"".join(chunks) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        b"3;" + b"x" * 1_000_000 + b"\r\nabc\r\n",
        b"0" * 1_000_000 + b"3\r\nabc\r\n",
        b"".join(b"1;" + b"x" * 200 + b"\r\na\r\n" for _ in range(10_000)),
    ],
    ids=["one-extension", "zeros", "many-extensions"],
)
async def test_chunks_that_are_mostly_framing_are_refused(framing: bytes) -> None:
    """Body size is limited: its framing means nothing here and must not cost more."""
    async with serving() as (service, connect):
        service.let.set()
        with connect() as client:
            answer = await asyncio.to_thread(talk, client, chunked(framing))
        assert answer.startswith(b"HTTP/1.1 400"), answer[:200]


@pytest.mark.parametrize(
    ("chunk_bytes", "body_bytes", "status"), [(1, 50_000, 200), (1, 300_000, 400), (8, 600_000, 200)]
)
async def test_small_chunks_are_accepted_up_to_a_bound(chunk_bytes: int, body_bytes: int, status: int) -> None:
    """A client that writes in small pieces is served; one that sends hundreds of thousands of chunks is not."""
    chunk = f"{chunk_bytes:x}\r\n{'a' * chunk_bytes}\r\n".encode()
    async with serving() as (service, connect):
        service.let.set()
        with connect() as client:
            answer = await asyncio.to_thread(talk, client, chunked(chunk * (body_bytes // chunk_bytes)))
        assert answer.split()[1] == str(status).encode()
        assert status == 400 or answer.endswith(str(body_bytes).encode())


async def test_a_connection_waits_while_the_kernel_is_out_of_memory() -> None:
    """It is retried after a while, not in every turn of the loop, and succeeds."""
    tries, faults = list[int](), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, fault: faults.append(fault))

    class Short(socket.socket):
        """Fail the first two accepts for lack of memory."""

        def accept(self) -> tuple[socket.socket, Any]:
            tries.append(1)
            if len(tries) <= 2:
                raise OSError(errno.ENOBUFS, "No buffer space available")
            return super().accept()

    joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    class Greeted(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            joined.set_result(None)
            transport.close()

    listener = Short()
    listener.bind(("127.0.0.1", 0))
    acceptor = Acceptor(listener, Greeted)
    acceptor.start()
    with socket.create_connection(listener.getsockname()):
        await asyncio.wait_for(joined, PATIENCE_S)
    acceptor.stop()
    assert faults == []


async def test_running_out_of_descriptors_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Under load each closed connection lets another in: a line for each would flood the journal."""
    listener = socket.create_server(("127.0.0.1", 0))
    joined: asyncio.Queue[asyncio.Transport] = asyncio.Queue()

    class Joined(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            joined.put_nowait(transport)

    acceptor = Acceptor(listener, Joined)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as clients:
        for _ in range(5):
            clients.enter_context(socket.create_connection(listener.getsockname()))
        with socket.socket() as lowest:
            room = lowest.fileno() + SPARE_DESCRIPTORS + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, before[1]))
        try:
            acceptor.start()
            for _ in range(5):  # there is a descriptor for one at a time
                (await asyncio.wait_for(joined.get(), PATIENCE_S)).abort()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            acceptor.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "the daemon is out of file descriptors: new connections wait"
    ]


def hold_up(meanwhile: Callable[[], None]) -> None:
    """Block for a while, as if the machine was suspended while the loop waited for data."""
    loop = asyncio.get_running_loop()
    read_end, write_end = os.pipe()

    def begin() -> None:
        loop.remove_reader(read_end)
        os.close(read_end)
        meanwhile()
        time.sleep(2 * LIMIT_S)

    loop.add_reader(read_end, begin)
    os.close(write_end)


@LOOPS
@pytest.mark.parametrize("before", [POST[:9], f"{POST}Content-Length: 4\r\n\r\nab"], ids=["head", "body"])
def test_data_that_arrived_during_a_stall_is_not_late(
    make_loop: Callable[[], asyncio.AbstractEventLoop], before: str
) -> None:
    """A machine that was suspended refuses nobody for it."""

    async def check() -> None:
        async with serving(header_timeout_s=LIMIT_S, body_timeout_s=LIMIT_S) as (service, connect):
            service.let.set()
            with connect() as client:
                client.sendall(before.encode())
                await soon(service.asked if before.endswith("ab") else service.made)
                rest = f"{POST}Content-Length: 4\r\n\r\nabab".removeprefix(before).encode()
                hold_up(lambda: client.sendall(rest))
                assert (await asyncio.to_thread(answer_to, client)).startswith(b"HTTP/1.1 200")

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(check())


H2C = POST.replace("close", "Upgrade, HTTP2-Settings") + "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
ASKS_FOR_ANOTHER = {
    "h2c": f"{H2C}Content-Length: 3\r\n\r\nabc",
    "h2c-chunked": f"{H2C}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "h2c-without-body": H2C.replace("POST", "GET") + "\r\n",
    "websocket": "GET / HTTP/1.1\r\nHost: melld\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("asked", ASKS_FOR_ANOTHER.values(), ids=ASKS_FOR_ANOTHER.keys())
async def test_an_upgrade_request_is_served_in_http_1_1(asked: str) -> None:
    """Java's client asks for HTTP/2 in the first request of each connection."""
    async with serving() as (service, connect):
        service.let.set()
        with connect() as client:
            client.sendall(asked.encode())
            assert (await asyncio.to_thread(client.recv, 65536)).startswith(b"HTTP/1.1 200")
            client.sendall(f"{POST}Content-Length: 1\r\n\r\na".encode())
            assert (await asyncio.to_thread(answer_to, client)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("before", ["", POST.replace("Connection: close\r\n", "Content-Length: 1\r\n\r\na")])
@pytest.mark.parametrize("asked", ASKS_FOR_ANOTHER.values(), ids=ASKS_FOR_ANOTHER.keys())
async def test_data_after_an_upgrade_request_closes_the_connection(asked: str, before: str) -> None:
    """It may be in the other protocol: everything before it is answered, then the client must resend."""
    async with serving() as (service, connect):
        service.let.set()
        with connect() as client:
            client.sendall(f"{before}{asked}{POST}Content-Length: 1\r\n\r\na".encode())
            answer = await asyncio.to_thread(answer_to, client)
    wanted = 2 if before else 1
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200 ") == wanted, answer


async def test_an_upgrade_request_may_come_in_pieces() -> None:
    """Its connection is kept alive, however the network split it."""
    async with serving() as (service, connect):
        service.let.set()
        with connect() as client:
            head, _, body = ASKS_FOR_ANOTHER["h2c"].partition("abc")
            client.sendall(head.encode())
            await soon(service.asked)
            client.sendall(f"abc{body}".encode())
            assert (await asyncio.to_thread(client.recv, 65536)).startswith(b"HTTP/1.1 200")
            client.sendall(f"{POST}Content-Length: 1\r\n\r\na".encode())
            assert (await asyncio.to_thread(answer_to, client)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_whole_answer_that_nobody_reads_is_dropped(connection: str) -> None:
    """Else each such client would hold megabytes for as long as it likes."""
    async with serving(slow_reader_s=0.3) as (service, connect):
        service.let.set()
        with connect() as client:
            client.sendall(f"GET /large HTTP/1.1\r\nHost: melld\r\nConnection: {connection}\r\n\r\n".encode())
            await soon(service.gone)
            read = await asyncio.to_thread(answer_to_the_end, client)
        assert len(read) < LARGE_BYTES


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[ReaderWatch]:
    """Those over the answers so far: a test has them look when a client that is slow has just read."""
    found: list[ReaderWatch] = []

    class Found(ReaderWatch):
        def __enter__(self) -> ReaderWatch:
            found.append(self)
            return super().__enter__()

    monkeypatch.setattr(connection, "ReaderWatch", Found)
    return found


async def test_a_whole_answer_that_is_read_slowly_completes(watches: list[ReaderWatch]) -> None:
    """Only a client that reads nothing at all is dropped.

    It reads more between two looks than its buffer holds: less, and the kernel may have acknowledged it all before.
    """
    async with serving(slow_reader_s=PATIENCE_S) as (service, connect):
        service.let.set()
        with connect(receive_bytes=65536) as client:
            client.sendall(b"GET /large HTTP/1.1\r\nHost: melld\r\nConnection: close\r\n\r\n")
            answer = client.makefile("rb")
            read = 0
            while piece := await asyncio.to_thread(answer.read, 1 << 20):
                read += len(piece)
                watches[0]._look()
        assert read > LARGE_BYTES


@LOOPS
def test_draining_the_kernel_s_buffer_counts_as_reading(
    make_loop: Callable[[], asyncio.AbstractEventLoop], watches: list[ReaderWatch]
) -> None:
    """The kernel takes no more of an answer until much of its buffer is read: that is progress, too."""

    async def scenario() -> None:
        async with serving(slow_reader_s=PATIENCE_S) as (service, connect):
            service.let.set()
            with connect(receive_bytes=4096) as client:
                client.sendall(b"GET /large HTTP/1.1\r\nHost: melld\r\nConnection: close\r\n\r\n")
                for turn in range(40):
                    assert await asyncio.to_thread(client.recv, 4096)
                    if turn % 10 == 9:
                        watches[0]._look()
                        assert not watches[0].ended
                watches[0]._look()
                watches[0]._look()
                assert watches[0].ended, "nothing was read between these"

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(scenario())
