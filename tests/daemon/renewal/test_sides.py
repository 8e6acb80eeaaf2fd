"""Each side of a renewal with a stand-in for the rest of its daemon: what its commands do, and what people hear."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from melld.api.admission import Admission
from melld.config import Config, ModelConfig
from melld.config_server import ServerConfig
from melld.control.messages import Renew, RenewalStep
from melld.control.status import DaemonState
from melld.daemon.renewal import channel as wire
from melld.daemon.renewal.handover import Event, State
from melld.daemon.renewal.new import NewSide
from melld.daemon.renewal.old import OldSide
from melld.daemon.renewal.succession import NotRenewed, Succession
from melld.daemon.watch import Condition
from melld.errors import MelldError
from tests.patience import PATIENCE_S

INHERITED = wire.Inherited(pid=1, address=("", 0), is_adopted=False, devices=(), has_stand_in=True)


class Daemon:
    """What a renewal needs of an idle daemon with one client connection; it notes what it is asked for."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.main_pids: list[str] = []
        self.ours, self.clients = socket.socketpair()
        self.end = lambda: self.notes.append("end")
        self.admission = Admission(lambda: 1, lambda: None)
        self.control = SimpleNamespace(is_given_away=False)
        self.condition = SimpleNamespace(renewal="", state=DaemonState.READY)
        self.answering = self.entrance = self.notifier = cast("Any", self)
        self.has_manager = True
        self.started_with: dict[str, str] = {}
        self.side: OldSide | None = None
        loans = SimpleNamespace(take_back=self.take_back)
        drains = SimpleNamespace(by_worker={})
        driver = SimpleNamespace(loans=loans, drains=drains)
        self.models = [SimpleNamespace(name="demo", parts=SimpleNamespace(driver=driver))]
        self.settings = SimpleNamespace(config=SimpleNamespace(server=SimpleNamespace(drain_s=5.0)))

    def inheritance(self) -> tuple[wire.Inherited, list[int]]:
        return INHERITED, []

    def open(self) -> None:
        self.notes.append("open")

    def close(self) -> None:
        self.notes.append("close")

    def give_away(self) -> list[socket.socket]:
        return [self.ours]

    def send(self, **said: str) -> bool:
        self.notes += said
        self.main_pids += said.values()
        return True

    async def rest(self) -> None:
        await asyncio.sleep(0)

    async def speak_for_service(self, _speaks: bool) -> None:
        await asyncio.sleep(0)

    async def speak(self) -> None:
        raise OSError("Too many open files")

    async def take_back(self, _loan: object) -> None:
        self.notes.append("take back")


@pytest.fixture
async def old(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OldSide]:
    """The old side of a renewal whose new one only waits."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-S", "-c", "import signal; signal.pause()"])
    daemon = Daemon()
    daemon.side = side = OldSide(cast("Succession", daemon))
    yield side
    with contextlib.suppress(ProcessLookupError):
        side._process.kill()
    side._process.wait()
    side.close()
    daemon.ours.close()
    daemon.clients.close()


def daemon_of(side: OldSide) -> Daemon:
    return cast("Daemon", side._daemon)


async def until_quiet(side: OldSide) -> None:
    while side._tasks:
        await asyncio.wait(side._tasks)
        await asyncio.sleep(0)


async def test_an_idle_daemon_too_hands_over_its_connections_and_its_name(old: OldSide) -> None:
    """A service manager would take the end of its main process for the end of the service."""
    old.state = State.GIVING
    old.happen(Event.LEFT)
    await until_quiet(old)
    assert daemon_of(old).notes == ["close", "MAINPID", "end"]
    assert daemon_of(old).ours.fileno() < 0, "passed on, and closed here"
    assert old.told().step is RenewalStep.RENEWED


async def test_devices_come_back_whatever_else_fails(old: OldSide) -> None:
    """A daemon that is out of descriptors for a moment is not without its devices for ever."""
    daemon_of(old).control.is_given_away = True
    old.happen(Event.OTHER_ENDED)
    await until_quiet(old)
    assert daemon_of(old).notes == ["open", "MAINPID", "take back"]


async def test_a_daemon_that_serves_again_is_the_main_process_again(old: OldSide) -> None:
    """The manager would follow the dead one, and end the service."""

    async def rest() -> None:
        old.happen(Event.OTHER_ENDED)

    daemon_of(old).rest = rest  # type: ignore[method-assign]
    old.state = State.GIVING
    old.happen(Event.LEFT)
    await until_quiet(old)
    assert daemon_of(old).main_pids == [str(old._process.pid), str(os.getpid())]


async def test_what_cannot_be_understood_calls_the_renewal_off(old: OldSide) -> None:
    """The operator hears why, and waits for no more; descriptors in such a message are not kept."""
    reading, writing = os.pipe()
    old.close()
    old._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        old.listen()
        socket.send_fds(theirs, [b'{"type": "Pledged"}'], [writing])
        old.news.clear()
        await old.news.wait()
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)
    await until_quiet(old)
    assert "another version of melld" in old.told().told
    assert old.told().step is RenewalStep.KEPT


async def test_the_new_side_says_that_it_does_not_understand() -> None:
    """Both would wait for each other for ever otherwise."""
    lock, control = os.open(os.devnull, os.O_RDONLY), socket.socket(socket.AF_UNIX)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    new = NewSide(ours, INHERITED, [lock, control.detach()])
    with theirs, new.control:
        new.listen()
        theirs.send(b'{"type": "Pledged"}')
        theirs.setblocking(False)
        told = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(theirs, wire.MAX_MESSAGE_BYTES), PATIENCE_S)
        new.close()
    os.close(lock)
    assert b"another version of melld" in told


async def test_nobody_hears_that_a_daemon_serves_which_was_ended(old: OldSide) -> None:
    """`systemctl stop` during a renewal ends both: the operator's script must not go on."""
    old.happen(Event.STOPPED)
    assert old.told().step is RenewalStep.STOPPED
    assert old._process.wait() < 0


def test_a_daemon_of_another_version_is_named_as_the_reason() -> None:
    """The operator then knows to restart instead."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b'{"type": "Inherited", "pid": 1, "host": "127.0.0.1", "port": 8000}')
        with pytest.raises(MelldError, match=r"another version of melld.*restart"):
            NewSide.found({wire.VARIABLE: str(theirs.detach())})


class Asked(Succession):
    """A daemon that can be renewed but for what a test sets; `on_leave` happens as it writes its handover file."""

    def __init__(self, tmp_path: Path) -> None:
        config = Config(model=ModelConfig(path="m"), server=ServerConfig(runtime_directory=str(tmp_path)))
        super().__init__(config, Condition(state=DaemonState.READY), lambda: None)
        self.files = 0
        self.on_leave: Callable[[], None] = lambda: None

    async def leave(self) -> None:
        self.files += 1
        self.on_leave()

    def _why_never_renewed(self) -> str | None:
        return None

    async def refusal(self) -> str:
        with pytest.raises(NotRenewed) as refused:
            await self.renew(Renew(), cast("Any", None))
        return str(refused.value)


async def test_a_refused_renewal_leaves_the_handover_file_alone(old: OldSide, tmp_path: Path) -> None:
    """It may be the predecessor's, still unread, or just being written: all stored responses are in it."""
    asked = Asked(tmp_path)
    asked.condition.state = DaemonState.STARTING
    assert "try again once it is ready" in await asked.refusal()
    asked.condition.state, asked.side = DaemonState.READY, old
    assert "already in progress" in await asked.refusal()
    asked.side, asked.before = None, cast("Any", SimpleNamespace(is_alone=False, inherited=SimpleNamespace(pid=7)))
    assert "pid 7" in await asked.refusal()
    assert asked.files == 0


async def test_of_two_renewals_at_once_one_is_refused(old: OldSide, tmp_path: Path) -> None:
    """The second might begin while the first writes its file."""
    asked = Asked(tmp_path)
    asked.on_leave = lambda: setattr(asked, "side", old)
    assert "already in progress" in await asked.refusal()
    assert asked.side is old


async def test_a_daemon_out_of_descriptors_still_speaks_to_its_manager(tmp_path: Path) -> None:
    """It would be taken for hung, and killed, though it serves."""
    asked, told = Asked(tmp_path), []

    async def fails() -> None:
        raise OSError("Too many open files")

    async def speak(speaks: bool) -> None:
        told.append(speaks)

    asked.control, asked.answering = cast("Any", SimpleNamespace()), cast("Any", SimpleNamespace(listen=fails))
    asked.speak_for_service = speak
    with pytest.raises(OSError, match="Too many"):
        await asked.speak()
    assert told == [True]
