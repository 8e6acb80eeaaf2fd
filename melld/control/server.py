"""The control socket: the operator's side of the daemon, over HTTP on a Unix socket.

Owns routing, decoding and the form of the answers.  Never decides anything: the operations do.  The modes of the socket
and its directory alone decide who may connect (`melld.control.runtime_directory`).

    GET /status          DaemonStatus
    POST /<operation>    the operation's Struct as JSON (an empty body for one without fields) -> its answer's Struct
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from melld.control.messages import ControlErrorBody
from melld.control.runtime_directory import ControlSocket
from melld.control.status import DaemonStatus
from melld.errors import ConfigError, MelldError

log = logging.getLogger("melld.control")
MAX_BODY_BYTES = 64 << 10
LOOK_S = 5.0


class Operation(NamedTuple):
    """An operation's message type and its handler, which raises `MelldError` if it cannot be carried out."""

    takes: type[msgspec.Struct]
    act: Callable[[Any], Awaitable[msgspec.Struct]]


class OpenCall:
    """A client whose operation lasts as long as its connection."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._answer: web.StreamResponse | None = None
        self.left: asyncio.Future[bytes] = asyncio.ensure_future(request.content.read())
        """Done once the client has gone, however it went."""

    async def say(self, message: msgspec.Struct) -> None:
        """Send a line.

        Raises:
            ConnectionError: the client has gone.
        """
        if self._answer is None:
            self._answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await self._answer.prepare(self._request)
        await self._answer.write(msgspec.json.encode(message) + b"\n")

    async def end(self, refusal: web.Response) -> web.StreamResponse:
        """Return the answer, or the refusal if nothing has been said."""
        self.left.cancel()
        await asyncio.gather(self.left, return_exceptions=True)
        return self._answer or refusal


class Lasting(NamedTuple):
    """An operation whose handler may send several messages; it returns when done, or at the latest once `left`."""

    takes: type[msgspec.Struct]
    act: Callable[[Any, OpenCall], Awaitable[None]]


def create_control_app(
    operations: Mapping[str, Operation | Lasting], current_status: Callable[[], DaemonStatus]
) -> web.Application:
    """Build the application that answers on the control socket."""
    lasting: set[asyncio.Task[Any]] = set()

    async def status(_request: web.Request) -> web.Response:
        return _answer(current_status())

    async def operate(request: web.Request) -> web.StreamResponse:
        name = request.match_info["operation"]
        operation = operations.get(name)
        if operation is None:
            known = ", ".join(sorted(operations)) or "none"
            return _refusal(404, "unknown_operation", f"no operation {name!r}; available: {known}")
        try:
            body = await (request.content.readline() if isinstance(operation, Lasting) else request.read())
        except (ConnectionError, web.RequestPayloadError) as error:  # the client left, or does not speak HTTP
            return _refusal(400, "bad_request", f"{name}: the request body cannot be read: {error}")
        try:
            asked = msgspec.json.decode(body or b"{}", type=operation.takes)
        except msgspec.MsgspecError as error:  # not JSON, or not of this shape
            return _refusal(400, "bad_request", f"{name}: {error}")
        try:
            if isinstance(operation, Operation):
                return _answer(await operation.act(asked))
            return await _last(operation, asked, OpenCall(request), lasting)
        except ConfigError as error:
            return _refusal(400, "config_error", str(error))
        except MelldError as error:
            return _refusal(error.status, error.code, str(error))

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/status", status)
    app.router.add_post("/{operation}", operate)

    async def end_lasting(_app: web.Application) -> None:
        for task in lasting:
            task.cancel()

    app.on_shutdown.append(end_lasting)
    return app


async def _last(
    operation: Lasting, asked: msgspec.Struct, call: OpenCall, lasting: set[asyncio.Task[Any]]
) -> web.StreamResponse:
    task = asyncio.current_task()
    assert task is not None
    lasting.add(task)
    try:
        await operation.act(asked, call)
    except ConnectionError:  # it has gone in the middle of a word
        pass
    finally:
        lasting.discard(task)
        answer = await call.end(_refusal(400, "bad_request", "the client disconnected"))
    return answer


class ControlServer:
    """Serves the control socket, and restores it if it is removed.

    A login session's directory goes with the user's last session, while a daemon in tmux runs on.
    """

    def __init__(self, runner: web.AppRunner, control: ControlSocket) -> None:
        self._runner = runner
        self._control = control
        self._site: web.SockSite | None = None
        self._is_told = False
        self._is_resting = True

    async def listen(self) -> None:
        """Answer at the socket that is in place now, and no longer at an earlier one."""
        await self.rest()
        self._is_resting = False
        with contextlib.ExitStack() as undo:
            own = undo.enter_context(self._control.listener.dup())  # which is closed with the site
            site = web.SockSite(self._runner, own)
            await site.start()
            undo.pop_all()
        self._site = site

    async def rest(self) -> None:
        """Accept no connection until `listen`; the socket stays."""
        self._is_resting = True
        earlier, self._site = self._site, None
        if earlier is not None:
            await earlier.stop()

    async def stay(self) -> None:
        """Check every `LOOK_S` seconds, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Restore the socket if it is gone; warn once on failure, and retry at the next check."""
        if self._is_resting or (self._control.is_in_place and self._site is not None):
            return
        try:
            if not self._control.is_in_place:
                self._control.put_back()
        except (MelldError, OSError) as error:
            if not self._is_told:
                log.warning("the control socket was removed and cannot be restored: %s", error)
            self._is_told = True
            return
        self._is_told = False
        await self.listen()
        log.warning("the control socket was removed; restored it: %s", self._control.path)


@contextlib.asynccontextmanager
async def serve_control(
    operations: Mapping[str, Operation | Lasting],
    status: Callable[[], DaemonStatus],
    control: ControlSocket,
    *,
    listens: bool = True,
) -> AsyncIterator[ControlServer]:
    """Answer on the control socket while the block runs, from now on or from `listen` on.  Its owner closes it.

    Connections of the last moment are closed with the rest by uvloop; asyncio would keep some (python/cpython#109564).
    """
    runner = web.AppRunner(create_control_app(operations, status), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    server = ControlServer(runner, control)
    try:
        if listens:
            await server.listen()
        yield server
    finally:
        await runner.cleanup()


def _answer(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _refusal(status: int, code: str, message: str) -> web.Response:
    body = msgspec.json.encode(ControlErrorBody(code=code, message=message))
    return web.Response(status=status, body=body, content_type="application/json")
