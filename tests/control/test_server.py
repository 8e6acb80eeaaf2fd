"""The control socket: who may reach it, who holds it, and what it answers, over real sockets."""

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop
from aiohttp import web

from melld.control import server as server_module
from melld.control.client import ControlClient, ControlRefused, NoDaemon
from melld.control.messages import CONTROL_SOCKET, Reload, Reloaded
from melld.control.runtime_directory import ControlSocket, DaemonRunning, open_control_socket, runtime_directory
from melld.control.server import Lasting, OpenCall, Operation, serve_control
from melld.control.status import DaemonStatus
from melld.errors import ConfigError, RequestTooLarge, UnknownWorker
from tests.cli.plausible import STATUS
from tests.control.control_daemon import ControlDaemon, Operated
from tests.patience import PATIENCE_S


@pytest.fixture
def directory() -> Iterator[Path]:
    """Return a runtime directory that does not exist yet, with a short name, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="melld-") as parent:
        yield Path(parent) / "run"


class Move(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation with an argument, as later ones have."""

    request: str
    worker: str


async def reload(_asked: Reload) -> Reloaded:
    return Reloaded(applied=("server.drain_s",), needs_restart=("model.path",))


async def bad_reload(_asked: Reload) -> Reloaded:
    raise ConfigError("melld.toml", "[server.port] Expected `int`")


async def move(asked: Move) -> Move:
    raise RequestTooLarge(asked.request, 2048, 1024)


async def mistaken(_asked: Reload) -> Reloaded:
    raise ZeroDivisionError


@pytest.fixture
async def served(directory: Path) -> AsyncIterator[Operated]:
    """A control socket that answers in the test's own event loop."""
    context = Operated(STATUS, {"reload": Operation(Reload, reload), "move": Operation(Move, move)})
    with contextlib.closing(open_control_socket(directory)) as control:
        async with serve_control(context.operations, context.status, control):
            yield context


async def test_the_status_is_passed_on_unchanged(served: Operated, directory: Path) -> None:
    """Nothing is lost or renamed between the daemon and its operator."""
    text = await asyncio.to_thread(ControlClient([directory]).status)
    assert msgspec.json.decode(text, type=DaemonStatus) == STATUS


def test_only_its_own_user_can_reach_the_socket(directory: Path) -> None:
    """Whoever can open it commands the daemon, so nobody else may, whatever the umask and from the start."""
    before = os.umask(0)
    try:
        with contextlib.closing(open_control_socket(directory)) as control:
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert stat.S_IMODE(control.path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


async def test_an_operation_takes_and_returns_structs(served: Operated, directory: Path) -> None:
    """New operations join the table without new plumbing."""
    text = await asyncio.to_thread(ControlClient([directory]).operate, "reload", Reload())
    assert msgspec.json.decode(text, type=Reloaded) == Reloaded(
        applied=("server.drain_s",), needs_restart=("model.path",)
    )


async def test_an_operation_added_later_is_found(served: Operated, directory: Path) -> None:
    """The table may grow while the daemon starts."""
    served.operations["again"] = Operation(Reload, reload)
    text = await asyncio.to_thread(ControlClient([directory]).operate, "again", Reload())
    assert b"applied" in text


@pytest.mark.parametrize(
    ("operation", "message", "http_status", "code", "why"),
    [
        ("fly", Reload(), 404, "unknown_operation", "no operation 'fly'; available: bad-reload, move, reload"),
        ("move", Reload(), 400, "bad_request", "missing required field `request`"),
        ("reload", Move("a", "b"), 400, "bad_request", "unknown field `request`"),
        ("bad-reload", Reload(), 400, "config_error", "melld.toml: [server.port] Expected `int`"),
        ("move", Move("r1", "w1"), 400, "request_too_large", "request r1 needs 2048 bytes"),
        ("move", Move("r" * 70_000, "w1"), 413, "internal_error", "returned 413"),
    ],
)
async def test_a_refused_operation_is_answered_with_the_reason(
    served: Operated,
    directory: Path,
    operation: str,
    message: msgspec.Struct,
    http_status: int,
    code: str,
    why: str,
) -> None:
    """An operator sees one line that says what to do, and the daemon goes on."""
    served.operations["bad-reload"] = Operation(Reload, bad_reload)
    with pytest.raises(ControlRefused) as refused:
        await asyncio.to_thread(ControlClient([directory]).operate, operation, message)
    assert (refused.value.http_status, refused.value.reason.code) == (http_status, code)
    assert why in str(refused.value)
    assert await asyncio.to_thread(ControlClient([directory]).status)


async def test_an_internal_error_is_reported_and_logged(
    served: Operated, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator is sent to the log, which has the traceback."""
    served.operations["mistaken"] = Operation(Reload, mistaken)
    with pytest.raises(ControlRefused, match="see its log"):
        await asyncio.to_thread(ControlClient([directory]).operate, "mistaken", Reload())
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("body", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"])
async def test_a_client_that_leaves_midway_is_no_error(
    served: Operated, directory: Path, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    """Ctrl-C leaves no traceback in the log, and the next client is answered."""
    begun = asyncio.Event()
    read = web.BaseRequest.read

    async def told(request: web.BaseRequest) -> bytes:
        begun.set()
        return await read(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web.BaseRequest, "read", told)
        _, writer = await asyncio.open_unix_connection(str(directory / CONTROL_SOCKET))
        writer.write(b"POST /reload HTTP/1.1\r\nHost: melld\r\n" + body)
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        writer.close()
        await writer.wait_closed()
        assert await asyncio.to_thread(ControlClient([directory]).status)
    assert caplog.records == []


async def test_an_operation_may_last_as_long_as_its_connection(served: Operated, directory: Path) -> None:
    """A loan ends with its borrower, however that ends: the client's end is noticed at once."""
    over = asyncio.Event()

    async def last(asked: Move, call: OpenCall) -> None:
        await call.say(asked)
        await call.say(Reload())
        await asyncio.wait({call.left})
        over.set()

    served.operations["last"] = Lasting(Move, last)
    client = ControlClient([directory])
    answer = await asyncio.to_thread(client.begin, "last", Move("r1", "w1"))
    lines = answer.lines()
    assert msgspec.json.decode(await asyncio.to_thread(next, lines), type=Move) == Move("r1", "w1")
    assert await asyncio.to_thread(next, lines) == b"{}"
    assert not over.is_set()
    answer.close()
    await asyncio.wait_for(over.wait(), PATIENCE_S)


async def test_a_refused_lasting_operation_is_reported_like_any_other(served: Operated, directory: Path) -> None:
    """A borrower sees why there is no device."""

    async def refuse(_asked: Move, _call: OpenCall) -> None:
        raise UnknownWorker("w7", ["w0"])

    served.operations["refuse"] = Lasting(Move, refuse)
    client = ControlClient([directory])
    with pytest.raises(ControlRefused, match="no worker 'w7'"):
        await asyncio.to_thread(client.begin, "refuse", Move("r1", "w1"))
    with pytest.raises(ControlRefused, match="missing required field"):
        await asyncio.to_thread(client.begin, "refuse", Reload())


def test_the_daemon_s_end_does_not_wait_for_lasting_operations(directory: Path) -> None:
    """Nor does it report a disconnect to them: what is lent then is not taken back."""
    ends: list[str] = []

    async def last(asked: Reload, call: OpenCall) -> None:
        await call.say(asked)
        try:
            await asyncio.wait({call.left})
            ends.append("left")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    with ControlDaemon(directory, Operated(STATUS, {"last": Lasting(Reload, last)})):
        answer = ControlClient([directory]).begin("last", Reload())
        lines = answer.lines()
        assert next(lines) == b"{}"
    assert list(lines) == []
    answer.close()
    assert ends == ["cancelled"]


async def test_an_answer_has_a_deadline(served: Operated, directory: Path) -> None:
    """A daemon that hangs does not hang its operator, and is not reported as gone."""
    never = asyncio.Event()

    async def hang(_asked: Reload) -> Reloaded:
        await never.wait()
        return Reloaded()

    served.operations["hang"] = Operation(Reload, hang)
    with pytest.raises(ControlRefused, match=r"did not answer within 0\.2 s") as refused:
        await asyncio.to_thread(ControlClient([directory]).operate, "hang", Reload(), 0.2)
    assert refused.value.reason.code == "no_answer"
    never.set()


async def test_an_operation_does_not_hold_up_the_status(served: Operated, directory: Path) -> None:
    """A drain that takes a minute can be watched, without any effect on it."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(_asked: Reload) -> Reloaded:
        begun.set()
        await release.wait()
        return Reloaded(applied=("late",))

    served.operations["slow"] = Operation(Reload, slow)
    client = ControlClient([directory])
    asking = asyncio.create_task(asyncio.to_thread(client.operate, "slow", Reload(), 30.0))
    await begun.wait()
    assert await asyncio.to_thread(client.status)
    release.set()
    assert b"late" in await asking


@pytest.mark.parametrize("turns", range(8))
def test_a_last_moment_connection_is_closed_too(directory: Path, turns: int) -> None:
    """`melld status` that comes as the daemon ends hears so at once, at any step of its arrival."""

    async def come_and_end(client: socket.socket, control: ControlSocket) -> None:
        async with serve_control({}, lambda: STATUS, control):
            client.connect(str(control.path))
            for _ in range(turns):
                await asyncio.sleep(0)
        control.close()
        end = asyncio.to_thread(client.recv, 1)
        with contextlib.suppress(ConnectionResetError):
            assert await end == b""

    with socket.socket(socket.AF_UNIX) as client, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client.settimeout(PATIENCE_S)
        runner.run(come_and_end(client, open_control_socket(directory)))


def test_a_missing_daemon_is_reported_with_every_place_tried(directory: Path) -> None:
    """A script can tell `no daemon` from a refusal, and a person sees where it looked."""
    directory.mkdir(mode=0o700)
    other = directory / "other"
    other.mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(other / CONTROL_SOCKET))
        with pytest.raises(NoDaemon) as nobody:
            ControlClient([directory, other]).status()
    assert [(path.parent, why) for path, why in nobody.value.tried] == [
        (directory, "no such socket"),
        (other, "nobody listens"),
    ]


def test_a_daemon_that_ends_during_a_request_counts_as_none(directory: Path) -> None:
    """It is gone, not wrong."""
    with contextlib.closing(open_control_socket(directory)) as control:
        control.listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "melld", "status", "--runtime-directory", str(directory)],
            stderr=subprocess.PIPE,
            text=True,
        )
        control.listener.settimeout(PATIENCE_S)
        control.listener.accept()[0].close()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "closed the connection" in said) == (3, True)


def test_a_dead_daemon_s_socket_is_replaced(directory: Path) -> None:
    """After a crash or a power cut, the next start needs no cleaning up."""
    code = f"""
import os, signal
from pathlib import Path
from melld.control.runtime_directory import open_control_socket
control = open_control_socket(Path({str(directory)!r}))
control.listener.listen()
os.kill(os.getpid(), signal.SIGKILL)
"""
    dead = subprocess.run([sys.executable, "-c", code], check=False)
    assert dead.returncode == -9
    assert (directory / CONTROL_SOCKET).is_socket()
    with contextlib.closing(open_control_socket(directory)) as control:
        control.listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(control.path))


async def test_a_second_daemon_is_refused_and_the_first_goes_on(served: Operated, directory: Path) -> None:
    """Two daemons never fight for one socket; the message names the process to look for."""
    with pytest.raises(DaemonRunning, match=f"pid {os.getpid()}") as refused:
        await asyncio.to_thread(open_control_socket, directory)
    assert (refused.value.directory, refused.value.pid) == (directory, os.getpid())
    assert await asyncio.to_thread(ControlClient([directory]).status)


def test_a_daemon_that_does_not_listen_yet_holds_its_place(directory: Path) -> None:
    """Two daemons started at the same moment: the second is refused before it has loaded a model."""
    holder = contextlib.closing(open_control_socket(directory))
    with holder, pytest.raises(DaemonRunning, match="another melld runs"):
        open_control_socket(directory)


def test_the_place_is_free_after_the_end(directory: Path) -> None:
    """A restart follows at once; nothing is left in the directory."""
    open_control_socket(directory).close()
    assert list(directory.iterdir()) == []
    open_control_socket(directory).close()


def remove(path: Path) -> None:
    """Remove a socket, or a directory with all that is in it."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def test_a_removed_control_socket_comes_back(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last logout removes a session's directory; a daemon in tmux is reachable again after the next login."""
    client = ControlClient([directory])
    with contextlib.closing(open_control_socket(directory)) as control:
        async with serve_control({}, lambda: STATUS, control) as server:
            for removed in (control.path, directory):
                remove(removed)
                with pytest.raises(NoDaemon, match="no such socket"):
                    await asyncio.to_thread(client.status)
                await server.look()
                assert stat.S_IMODE(control.path.stat().st_mode) == 0o600
                with pytest.raises(DaemonRunning):
                    await asyncio.to_thread(open_control_socket, directory)
                assert await asyncio.to_thread(client.status)  # later than the other daemon's question
            await server.look()
    assert [record.getMessage() for record in caplog.records] == [
        f"the control socket was removed; restored it: {control.path}"
    ] * 2
    assert names_in(directory) == []


async def test_the_next_look_completes_a_half_failed_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is in its place again, but nobody listens: the next look must not accept that."""
    with contextlib.closing(open_control_socket(directory)) as control:
        async with serve_control({}, lambda: STATUS, control) as server:
            remove(control.path)
            with monkeypatch.context() as failing:
                failing.setattr(server_module.web, "SockSite", lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    await server.look()
            assert control.is_in_place
            await server.look()
            assert await asyncio.to_thread(ControlClient([directory]).status)


async def test_a_control_socket_that_cannot_return_is_logged_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the next login there is no place for it: the daemon serves on and keeps trying."""
    with contextlib.closing(open_control_socket(directory)) as control:
        async with serve_control({}, lambda: STATUS, control) as server:
            remove(directory)
            await asyncio.to_thread(directory.symlink_to, "nowhere")
            for _ in range(3):
                await server.look()
            [said] = [record.getMessage() for record in caplog.records]
            assert said.startswith("the control socket was removed and cannot be restored: ")
            await asyncio.to_thread(directory.unlink)
            await server.look()
            assert await asyncio.to_thread(ControlClient([directory]).status)


async def test_the_next_daemon_s_socket_is_left_alone(directory: Path) -> None:
    """Where the directory was removed, another daemon may have the place: the first takes nothing from it."""
    first = open_control_socket(directory)
    async with contextlib.AsyncExitStack() as second:
        async with serve_control({}, lambda: STATUS, first) as server:
            remove(directory)
            bound = second.enter_context(contextlib.closing(open_control_socket(directory)))
            await second.enter_async_context(serve_control({}, lambda: STATUS, bound))
            await server.look()
        first.close()
        assert await asyncio.to_thread(ControlClient([directory]).status)


def test_a_directory_open_to_others_is_refused(directory: Path) -> None:
    """Its mode is the only lock on the door."""
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0755"):
        open_control_socket(directory)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    """Where everybody may write, somebody else could have made ours before us."""
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        open_control_socket(directory)


def test_a_symbolic_link_in_its_place_is_not_followed(directory: Path, tmp_path: Path) -> None:
    """A link leads where its maker wants."""
    directory.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="runtime directory"):
        open_control_socket(directory)


def test_a_file_in_the_socket_s_place_is_kept(directory: Path) -> None:
    """Only a socket counts as stale."""
    directory.mkdir(mode=0o700)
    (directory / CONTROL_SOCKET).write_text("mine")
    with pytest.raises(ConfigError, match="in use"):
        open_control_socket(directory)
    assert (directory / CONTROL_SOCKET).read_text() == "mine"


def test_a_name_too_long_for_a_socket_is_reported(directory: Path) -> None:
    """The kernel's own message helps nobody."""
    with pytest.raises(ConfigError, match="too long for a socket"):
        open_control_socket(directory / ("d" * 100))


@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [
        ("/srv/melld", {"RUNTIME_DIRECTORY": "/run/melld"}, "/srv/melld"),
        (None, {"RUNTIME_DIRECTORY": "/run/melld:/run/other", "XDG_RUNTIME_DIR": "/run/user/7"}, "/run/melld"),
        (None, {"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/melld"),
        (None, {}, f"/tmp/melld-{os.getuid()}"),  # noqa: S108
        (None, {"RUNTIME_DIRECTORY": "", "XDG_RUNTIME_DIR": ""}, f"/tmp/melld-{os.getuid()}"),  # noqa: S108
        (None, {"XDG_RUNTIME_DIR": "relative"}, f"/tmp/melld-{os.getuid()}"),  # noqa: S108
    ],
)
def test_daemon_and_command_agree_on_the_directory(
    configured: str | None, environment: dict[str, str], expected: str
) -> None:
    """`melld status` finds what `melld serve` made, under systemd, in a session, and in a bare container."""
    assert runtime_directory(configured, environment) == Path(expected)
